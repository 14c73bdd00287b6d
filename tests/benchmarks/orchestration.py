"""What an iteration costs beyond its steps, from a hundred trajectories to a hundred thousand.

    python tests/benchmarks/orchestration.py

Prefect, Ray, ledger, MLflow and session are those of `rollbook run`; each of the six steps writes a rollouts table of
that many trajectories and does nothing else. Reported is what `show` reports: the iteration's wall time less the steps'
own.
"""

import os
import statistics
import tempfile
from typing import Any

HOME = tempfile.mkdtemp(prefix="rollbook-benchmark-")
os.environ["ROLLBOOK_HOME"] = HOME

from infra.home import Home

Home.find().set_environment()
Home.find().prepare()  # before Prefect is imported

import pyarrow as pa
import pyarrow.parquet as pq

from data.columns import ROLLOUTS
from data.config import EvaluateConfig
from data.manifest import Manifest
from data.schema import conform
from data.summary import STEPS, summarize
from flows import training
from flows.config import RunConfig
from flows.session import open_ledger
from tasks.step import Job, Run, Step, perform
from tests.benchmarks.tables import short_row

SIZES, ITERATIONS = (100, 1_000, 10_000, 100_000), 6


def write(resource: Any, job: Job, file: str) -> Manifest:
    attempt = job.attempt()
    attempt.add_table("rollouts", conform("rollouts", pq.read_table(file, schema=ROLLOUTS)))
    metrics = {"reward/mean": 0.0} | {f"metric/{i}": float(i) for i in range(25)}
    return attempt.commit(metrics=metrics, facts={"policy_version": 0})


def steps_of(file: str, rows: int) -> Any:
    """In the place of flows.training.one_iteration: the same chain, each step a table of `rows` rows."""

    def one_iteration(config: RunConfig, run: Run, k: int, head: training.Head) -> training.Head:
        made: Any = head.state
        for name in STEPS:
            step, inputs = Step(name, 1, "rollouts"), {"before": made}
            made = perform(run, step, k, inputs, {"rows": rows}, 0, run.worker, write, (file,))
        return training.Head(head.base, made, made, made)

    return one_iteration


def main() -> None:
    medians = {}
    for rows in SIZES:
        file = f"{HOME}/{rows}.parquet"
        pq.write_table(pa.Table.from_pylist([short_row(i) for i in range(rows)], schema=ROLLOUTS), file)
        training.one_iteration = steps_of(file, rows)
        config = RunConfig(run=f"rows-{rows}", iterations=ITERATIONS, evaluate=EvaluateConfig(problems=0))
        training.train(config)
        ledger = open_ledger(config, Home.find())
        done = summarize(ledger).iterations[1:]  # the first one loads what the others find warm
        spent = [iteration.orchestration or 0.0 for iteration in done]
        medians[rows] = statistics.median(spent)
        work = statistics.median(sum(iteration.seconds.values()) for iteration in done)
        print(f"{rows:>7} trajectories: {1000 * medians[rows]:6.1f} ms beyond the steps' own {work:.2f} s", flush=True)
    print(f"100,000 against 100: {medians[SIZES[-1]] / medians[SIZES[0]]:.2f} x")


if __name__ == "__main__":
    main()
