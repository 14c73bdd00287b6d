"""An iteration against a plain script that calls the same engine, trainer and formulas.

    python tests/benchmarks/iteration.py                        # the quickstart, on a CPU
    python tests/benchmarks/iteration.py flows/configs/smollm2_grpo.toml --iterations 50   # on a GPU

The script keeps nothing: no tables, ledger, lineage, MLflow, Prefect, Ray; weights go to the engine by a folder, as in
the product. Both start from the same policy and see the same prompts and seeds; where the engine honours seeds, their
first tokens agree. Iterations that are evaluated before or whose state is kept are not among those compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
from said import say

from data.config import LayoutConfig
from data.ids import child, root_id
from data.prompts import load_source
from data.runs import open_run
from data.seeds import derive
from flows.config import RunConfig, load
from models.engines.contract import Request, RolloutEngine, SamplingParams
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

WARM, COMPARED = 4, 16  # of iterations: left out at first; where the comparison ends
SORT = ["evaluate.problems=0", "warm_start.steps=40", "checkpoint.every=1000"]
PARTS = ("generate", "score", "replay", "advantages", "train", "publish")


class Script:
    """The loop, by hand."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.source, self.tokenizer = config, load_source(config.prompts), Tokenizer(folder)
        self.engine = _engine(config)
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
        roots, answers = [], []
        for i, prompt in enumerate(prompts):
            root = root_id(prompt.prompt_id, k * c.prompts.per_iteration + i)
            ids = np.array(self.tokenizer.encode_prompt(prompt.messages), np.int32)
            for name in (child(root, branch) for branch in range(c.prompts.samples_per_prompt)):
                asked.append(Request(name, ids, derive(seed, name)))
                roots.append(root)
                answers.append(str(prompt.metadata["answer"]))
        params = SamplingParams(1.0, 1.0, 0, c.sampling.max_new_tokens, self.tokenizer.eos_ids)
        said = self.engine.generate(asked, params)
        clock.append(time.perf_counter())
        texts = [self.tokenizer.decode(s.token_ids[:-1].tolist()) for s in said]
        score = SCORERS[c.reward.scorer]
        rewards = np.array([score(text, answer).reward for text, answer in zip(texts, answers, strict=True)])
        clock.append(time.perf_counter())
        rows = list(zip(asked, said, strict=True))
        streams = from_rows([np.concatenate([a.token_ids, s.token_ids]) for a, s in rows], np.int32)
        mask = from_rows([np.repeat([False, True], [len(a.token_ids), len(s.token_ids)]) for a, s in rows], np.bool_)
        order = mini_batches(len(streams), train.mini_batch, derive(derive(c.seed, "train", k), "epoch", 0))
        plan = [pack(streams.lengths, rows, train.micro_tokens) for rows in order]
        critic = c.critic.kind != "none"
        replayed = self.trainer.replay(streams, mask, [rows for mini in plan for rows in mini], 1.0, critic)
        assert replayed is not None
        clock.append(time.perf_counter())
        names = pa.array([a.trajectory_id for a in asked])
        batch = AdvantageBatch(
            names,
            pa.array(roots),
            pa.array(["train"] * len(asked)),
            rewards,
            np.array([s.finish_reason == "length" for s in said]),
            to_arrow(mask, pa.bool_()),
            values=None if replayed.values is None else to_arrow(replayed.values, pa.float32()),
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
            None if columns.returns is None else from_arrow(columns.returns, "returns"),
            replayed.values,
        )
        for epoch in range(1, train.epochs):
            again = mini_batches(len(streams), train.mini_batch, derive(derive(c.seed, "train", k), "epoch", epoch))
            plan += [pack(streams.lengths, rows, train.micro_tokens) for rows in again]
        self.trainer.train(lessons, plan, TrainOptions(train, 1.0))
        clock.append(time.perf_counter())
        folder.mkdir()
        digest = self.trainer.export_policy(folder)
        self.engine.update_weights(folder, k + 1, digest, c.engine.sync == "tensor")
        clock.append(time.perf_counter())
        return np.diff(clock).tolist(), int(streams.values.sum())


def _engine(config: RunConfig) -> RolloutEngine:
    if config.engine.kind == "transformers":
        return TransformersEngine(config.engine.batch, config.resources.threads)
    from models.engines.sglang.engine import SGLangEngine

    return SGLangEngine(config.engine, config.resources.threads)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="flows/configs/sort.toml")
    parser.add_argument("--iterations", type=int, default=COMPARED, help="of the run; the script stops sooner")
    parser.add_argument("--set", action="append", default=[])
    told = parser.parse_args()
    overrides = [*(SORT if told.config.endswith("sort.toml") else []), f"iterations={told.iterations}", *told.set]
    config = load(told.config, overrides)
    with ExitStack() as stack:
        home = os.environ.get("ROLLBOOK_HOME") or stack.enter_context(tempfile.TemporaryDirectory())
        environment = os.environ | {"ROLLBOOK_HOME": home, "PYTHONPATH": f".:{os.environ.get('PYTHONPATH', '')}"}
        asked = [argument for pair in overrides for argument in ("--set", pair)]
        subprocess.run([sys.executable, "-m", "flows.cli", "run", told.config, *asked], env=environment, check=True)
        os.environ["ROLLBOOK_HOME"] = home
        run = open_run(config.run)
        recorded = [run.iteration(k) for k in range(told.iterations)]
        compared = [k for k in range(WARM, min(COMPARED, told.iterations)) if _plain(config, k)]
        walls = [recorded[k].metrics["seconds/iteration"] for k in compared]
        parts = [[recorded[k].metrics[f"seconds/{part}"] for part in PARTS] for k in compared]
        script = Script(config, base_of(Path(home) / "store"))
        memory = Path("/dev/shm") if config.engine.sync == "tensor" else Path(home)
        folders = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        plain: dict[int, list[float]] = {}
        for k in range(compared[-1] + 1):
            plain[k], tokens = script.iteration(k, folders / str(k))
            if k == 0 and config.engine.kind == "transformers":
                theirs = recorded[0].table("rollouts", ["token_ids"])["token_ids"].combine_chunks()
                assert tokens == int(theirs.flatten().to_numpy().sum()), "they did not sample the same tokens"
    by_script = [plain[k] for k in compared]
    product, by_hand = statistics.median(walls), statistics.median(map(sum, by_script))
    lines = [f"{'s':12}" + "".join(f"{part:>12}" for part in (*PARTS, "iteration"))]
    for name, rows, whole in (("Rollbook", parts, product), ("script", by_script, by_hand)):
        medians = [*map(statistics.median, zip(*rows, strict=True)), whole]
        lines.append(f"{name:12}" + "".join(f"{seconds:12.3f}" for seconds in medians))
    lines.append(f"iteration: {product / by_hand:.2f} times the script's (medians of {len(walls)})")
    for line in lines:
        say(line)


def _plain(config: RunConfig, k: int) -> bool:
    """Whether it is an iteration like most others."""
    every = config.evaluate.every
    return (k + 1) % config.checkpoint.every != 0 and not (every and (k % every == 0 or (k + 1) % every == 0))


def base_of(store: Path) -> Path:
    """The folder of the policy that the run began from: warm-started, or as it was imported."""
    manifests = [json.loads(path.read_text()) for path in store.glob("shared/*/*/manifest.json")]
    by_step = {manifest["step"]: manifest for manifest in manifests}
    found = by_step.get("warm_start") or by_step["import_model"]
    return store / Path(found["files"][0]["uri"]).parent


if __name__ == "__main__":
    main()
