"""Undisturbed runs, several seeds in one process: on residents that stay warm, and without Prefect.

`python tests/flows/twins.py CONFIG SEED,SEED,… --set a.b=c …`, in the folder that they are to be in.
"""

import sys
from dataclasses import replace

from infra.home import Home

if __name__ == "__main__":
    home = Home.find()
    home.set_environment()
    home.prepare()

    from flows.config import load
    from flows.session import make_run, open_ledger
    from flows.training import begin, evaluate_policy, one_iteration
    from infra.ray_session import Fleet

    path, seeds, *words = sys.argv[1:]
    fleet = Fleet("local")
    for seed in seeds.split(","):
        config = load(path, [*words[1::2], f"seed={seed}", f"run=seed-{seed}"])
        ledger = open_ledger(config, home)
        ledger.open_or_create(config)
        run = replace(make_run(config, ledger, home), fleet=fleet)
        head = begin(config, run)
        evaluate_policy(config, run, 0, head)
        for k in range(config.iterations):
            head = one_iteration(config, run, k, head)
        evaluate_policy(config, run, config.iterations, head)
    fleet.close()
