"""An iteration of the quickstart against a plain script that calls the same engine, trainer and formulas.

    python tests/benchmarks/iteration.py

The script keeps nothing: no tables, ledger, lineage, MLflow, Prefect, Ray; weights go to the engine by a folder, as in
the product. Both start from the same warm-started policy and see the same prompts and seeds: their first tokens agree.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.config import LayoutConfig
from data.ids import child, root_id
from data.prompts import load_source
from data.runs import open_run
from data.seeds import derive
from flows.config import RunConfig, load
from models.engines.contract import Request, SamplingParams
from models.engines.transformers import TransformersEngine
from models.megatron.contract import Setup, TrainBatch, TrainOptions
from models.megatron.trainer import Trainer
from models.tokenizer import Tokenizer
from models.weights import read_tensors, tensors_digest
from ops.advantages import AdvantageBatch, AdvantageOptions, estimate
from ops.packing import mini_batches, pack
from ops.ragged import from_arrow, from_rows, to_arrow
from ops.scorers import SCORERS
from tests.seaweed import free_ports

ITERATIONS, WARM = 16, 4
CONFIG = "flows/configs/sort.toml"
SET = [f"iterations={ITERATIONS}", "evaluate.problems=0", "warm_start.steps=40"]
PARTS = ("generate", "score", "replay", "advantages", "train", "publish")


class Script:
    """The loop, by hand."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.source, self.tokenizer = config, load_source(config.prompts), Tokenizer(folder)
        self.engine = TransformersEngine(config.engine.batch, config.resources.threads)
        (port,) = free_ports(1)
        self.trainer = Trainer(0, 1, f"tcp://127.0.0.1:{port}", config.resources.threads, LayoutConfig())
        digest = tensors_digest(read_tensors(folder))
        self.engine.update_weights(folder, 0, digest)
        self.setup = Setup(config.critic, config.train.optimizer)
        self.trainer.bring_to_policy(folder, digest, self.setup)

    def iteration(self, k: int, folder: Path) -> tuple[list[float], int]:
        """Seconds of its parts, and the sum of all tokens in it."""
        clock = [time.perf_counter()]
        c, train = self.config, self.config.train
        prompts = self.source.take(k * c.prompts.per_iteration, c.prompts.per_iteration, c.seed)
        seed = derive(c.seed, "generate", k)
        asked = []
        for i, prompt in enumerate(prompts):
            name = child(root_id(prompt.prompt_id, k * c.prompts.per_iteration + i), 0)
            ids = np.array(self.tokenizer.encode_prompt(prompt.messages), np.int32)
            asked.append(Request(name, ids, derive(seed, name)))
        params = SamplingParams(1.0, 1.0, 0, c.sampling.max_new_tokens, self.tokenizer.eos_ids)
        said = self.engine.generate(asked, params)
        clock.append(time.perf_counter())
        texts = [self.tokenizer.decode(s.token_ids[:-1].tolist()) for s in said]
        pairs = zip(texts, prompts, strict=True)
        rewards = np.array([SCORERS["exact"](text, str(p.metadata["answer"])).reward for text, p in pairs])
        clock.append(time.perf_counter())
        rows = list(zip(asked, said, strict=True))
        streams = from_rows([np.concatenate([a.token_ids, s.token_ids]) for a, s in rows], np.int32)
        mask = from_rows([np.repeat([False, True], [len(a.token_ids), len(s.token_ids)]) for a, s in rows], np.bool_)
        order = mini_batches(len(streams), train.mini_batch, derive(derive(c.seed, "train", k), "epoch", 0))
        plan = [pack(streams.lengths, rows, train.micro_tokens) for rows in order]
        replayed = self.trainer.replay(streams, mask, [rows for mini in plan for rows in mini], 1.0, True)
        assert replayed is not None and replayed.values is not None
        clock.append(time.perf_counter())
        names = pa.array([a.trajectory_id for a in asked])
        batch = AdvantageBatch(
            names,
            names,
            pa.array(["train"] * len(asked)),
            rewards,
            np.array([s.finish_reason == "length" for s in said]),
            to_arrow(mask, pa.bool_()),
            values=to_arrow(replayed.values, pa.float32()),
        )
        options = AdvantageOptions(**c.advantage.model_dump(exclude={"estimator"}))
        columns = estimate(c.advantage.estimator, batch, options)
        clock.append(time.perf_counter())
        lessons = TrainBatch(
            streams,
            mask,
            mask,
            replayed.logprobs,
            from_arrow(columns.token_advantages, "advantages"),
            from_arrow(columns.returns, "returns"),
            replayed.values,
        )
        for epoch in range(1, train.epochs):
            again = mini_batches(len(streams), train.mini_batch, derive(derive(c.seed, "train", k), "epoch", epoch))
            plan += [pack(streams.lengths, rows, train.micro_tokens) for rows in again]
        self.trainer.train(lessons, plan, TrainOptions(train, 1.0))
        clock.append(time.perf_counter())
        folder.mkdir()
        digest = self.trainer.export_policy(folder)
        self.engine.update_weights(folder, k + 1, digest)
        clock.append(time.perf_counter())
        return np.diff(clock).tolist(), int(streams.values.sum())


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"ROLLBOOK_HOME": home, "PYTHONPATH": "."}
        asked = [argument for pair in SET for argument in ("--set", pair)]
        subprocess.run([sys.executable, "-m", "flows.cli", "run", CONFIG, *asked], env=environment, check=True)
        os.environ["ROLLBOOK_HOME"] = home
        run = open_run("sort")
        recorded = [run.iteration(k) for k in range(ITERATIONS)]
        walls = [found.metrics["seconds/iteration"] for found in recorded][WARM:]
        parts = [[found.metrics[f"seconds/{part}"] for part in PARTS] for found in recorded][WARM:]
        script = Script(load(CONFIG, SET), base_of(Path(home) / "store"))
        plain = []
        for k in range(ITERATIONS):
            seconds, tokens = script.iteration(k, Path(home) / f"plain-{k}")
            plain.append(seconds)
            if k == 0:
                theirs = recorded[0].table("rollouts", ["token_ids"])["token_ids"].combine_chunks()
                assert tokens == int(theirs.flatten().to_numpy().sum()), "they did not sample the same tokens"
        plain = plain[WARM:]
    product, by_hand = statistics.median(walls), statistics.median(map(sum, plain))
    print(f"{'s':12}" + "".join(f"{part:>12}" for part in (*PARTS, "iteration")))
    for name, rows, whole in (("Rollbook", parts, product), ("script", plain, by_hand)):
        medians = [*map(statistics.median, zip(*rows, strict=True)), whole]
        print(f"{name:12}" + "".join(f"{seconds:12.3f}" for seconds in medians))
    print(f"iteration: {product / by_hand:.2f} times the script's (medians of {len(walls)})")


def base_of(store: Path) -> Path:
    """The folder of the policy that the run began from."""
    manifests = [json.loads(path.read_text()) for path in store.glob("shared/*/*/manifest.json")]
    (found,) = [manifest for manifest in manifests if manifest["step"] == "warm_start"]
    return store / Path(found["files"][0]["uri"]).parent


if __name__ == "__main__":
    main()
