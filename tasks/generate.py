"""generate: policy -> rollouts. One row per trajectory, token for token what the engine consumed and emitted."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from data.columns import CARRY, ROLLOUTS
from data.config import Generation
from data.ids import child, root_id
from data.manifest import Manifest
from data.prompts import Prompt, PromptSource
from data.seeds import derive
from infra import handover
from models.agents.loop import Trajectory
from models.engines.contract import RolloutEngine, SamplingParams
from ops.metrics import rollout_metrics
from tasks.episodes import Played, episode_of, play, played_in, source_of
from tasks.partial import Carried, Settled, groups_of, settle
from tasks.rollout_rows import Producer, row
from tasks.step import Job, Pending, Run, Step, perform, unless_given

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

STEP = Step("generate", version=1, kind="rollouts")


@dataclass(frozen=True)
class Draw:
    """Which prompts a generate step takes."""

    purpose: Literal["train", "eval"]
    cursor: int  # position in the endless seeded order of training prompts; of eval sets 0
    count: int
    samples: int = 1  # answers a prompt

    def keyed(self) -> dict[str, JsonValue]:
        """What of it enters the key. Training has its samples among the prompts' settings, one is what was always."""
        found: dict[str, JsonValue] = {"purpose": self.purpose, "cursor": self.cursor, "count": self.count}
        return found | ({"samples": self.samples} if self.purpose == "eval" and self.samples != 1 else {})


@unless_given(STEP)
def generate(
    run: Run,
    iteration: int,
    policy: Manifest | Pending,
    generation: Generation,
    before: Manifest | Pending | None,
) -> Manifest | Pending:
    """Rollouts of the next `prompts.per_iteration` prompts under `policy`, `samples_per_prompt` siblings each.

    before: what the iteration before generated; with `partial` its unfinished groups go on.
    """
    prompts, groups = generation.prompts, generation.partial.groups
    wanted, samples = prompts.per_iteration, prompts.samples_per_prompt
    if groups is None:
        return roll_out(run, STEP, iteration, policy, Draw("train", iteration * wanted, wanted, samples), generation)
    cursor, carried = 0, 0
    if isinstance(before, Manifest):
        cursor, carried = before.facts["cursor"]["end"], before.facts["carried_groups"]
    draw = Draw("train", cursor, groups - carried, samples)
    return roll_out(run, STEP, iteration, policy, draw, generation, {} if before is None else {"carry": before})


def roll_out(
    run: Run,
    step: Step,
    iteration: int,
    policy: Manifest | Pending,
    draw: Draw,
    generation: Generation,
    carry: Mapping[str, Manifest | Pending] | None = None,
) -> Manifest | Pending:
    """Rollouts of the prompts that `draw` names; also how evaluation generates. carry: input of that name, or none."""
    prompts, played = generation.prompts, played_in(generation.environment)
    source = source_of(prompts)
    config = {
        "prompts": {"system": prompts.system, "samples_per_prompt": prompts.samples_per_prompt},
        "draw": draw.keyed(),
        "sampling": generation.sampling.semantic(),
        "engine": generation.engine.semantic(),
    }
    config |= {"environment": played.keyed()} if played else {}
    if draw.purpose == "train" and generation.partial.groups is not None:
        config |= {"partial": generation.partial.semantic(), "wanted": prompts.per_iteration}
    seed = derive(run.seed, step.name, iteration) if draw.purpose == "train" else derive(run.seed, step.name)
    return perform(
        run,
        step,
        iteration,
        {
            "policy": policy,
            "prompts": source.digest if draw.purpose == "train" else source.held_out_digest,
            **(carry or {}),
        },
        config,
        seed,
        run.engine,
        _generate,
        (draw, generation, played, run.seed, run.hands_over),
        played.spec.code if played else {},
    )


def _generate(
    engine: RolloutEngine,
    job: Job,
    draw: Draw,
    generation: Generation,
    played: Played | None,
    order_seed: int,
    handed_over: bool,
) -> Manifest:
    """handed_over: the trainer may have left the policy in memory."""
    from models.tokenizer import tokenizer_of

    policy, sampling, partial = job.input("policy"), generation.sampling, generation.partial
    in_memory = handover.offered(policy.content_digest) if handed_over else None

    def sync(folder: Path) -> tuple["Tokenizer", float]:
        tokenizer, clock = tokenizer_of(folder), time.perf_counter()
        engine.update_weights(folder, policy.policy_version, policy.content_digest, in_memory is not None)
        return tokenizer, time.perf_counter() - clock

    tokenizer, sync_s = sync(in_memory) if in_memory else job.load(job.recorded("policy"), sync)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
        stop=tuple(sampling.stop),
    )
    source = source_of(generation.prompts)
    fresh = _trajectories(_roots(source, draw, order_seed), draw.samples, job.seed)
    wanted = None if draw.purpose == "eval" or partial.groups is None else generation.prompts.per_iteration
    carried = Carried.of(job, source, order_seed) if wanted else Carried()
    going_on = carried.within(policy.policy_version, partial.max_staleness)
    trajectories = [*going_on, *fresh]
    started, clock = datetime.now(UTC), time.perf_counter()
    sampled = play(engine, tokenizer, params, played, trajectories, wanted)
    seconds = time.perf_counter() - clock
    settled = settle(trajectories, wanted, partial.tail) if wanted else Settled(trajectories, [], [])
    producer = Producer(engine.name, engine.version, engine.logprob_semantics(params), tokenizer, sampling)
    attempt, version = job.attempt(), policy.policy_version
    rows = [row(trajectory, draw.purpose, producer, started) for trajectory in settled.committed]
    attempt.add_table("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS), policy_version=version)
    metrics = _metrics(settled.committed, sampled, seconds) | {"generate/sync_s": sync_s}
    facts = {
        "cursor": {"start": draw.cursor, "end": draw.cursor + draw.count},
        "duplicates": source.duplicates,
        "policy_version": version,
        "device": engine.health().device,
    }
    if wanted:
        rows = [carried.row(t, producer, started, job.iteration) for t in settled.carried]
        attempt.add_table("carry", pa.Table.from_pylist(rows, schema=CARRY), policy_version=version)
        submitted = len(carried.trajectories) + len(fresh)
        metrics |= settled.metrics(submitted, len(carried.trajectories) - len(going_on), version)
        facts |= {"carried_groups": len(groups_of(settled.carried))}
    job.recorded("policy")  # nothing is on record without what it was made with
    return attempt.commit(metrics=metrics, facts=facts)


def _metrics(trajectories: list[Trajectory], sampled: int, seconds: float) -> dict[str, float]:
    turns = np.array([trajectory.stream.turns for trajectory in trajectories])
    lengths = np.array([int(trajectory.stream.action_mask.sum()) for trajectory in trajectories])
    truncated = np.array([trajectory.status == "truncated" for trajectory in trajectories])
    failed = sum(trajectory.status == "failed" for trajectory in trajectories)
    return rollout_metrics(lengths, truncated, turns) | {
        "generate/tokens": float(sampled),
        "generate/tokens_per_s": sampled / seconds,
        "generate/failed": float(failed),
    }


def _roots(source: PromptSource, draw: Draw, seed: int) -> list[tuple[str, Prompt]]:
    """(root id, prompt); a root id is unique in its run, however often its prompt comes round."""
    if draw.purpose == "eval":
        return [(root_id(prompt.prompt_id, i), prompt) for i, prompt in enumerate(source.held_out(draw.count))]
    taken = source.take(draw.cursor, draw.count, seed)
    return [(root_id(prompt.prompt_id, draw.cursor + i), prompt) for i, prompt in enumerate(taken)]


def _trajectories(roots: list[tuple[str, Prompt]], samples: int, seed: int) -> list[Trajectory]:
    """`samples` siblings of each root."""
    pairs = [(child(root, branch), prompt) for root, prompt in roots for branch in range(samples)]
    return [Trajectory(episode_of(name, prompt, derive(seed, name))) for name, prompt in pairs]
