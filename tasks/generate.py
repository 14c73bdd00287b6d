"""generate: policy -> rollouts. One row per trajectory, token for token what the engine consumed and emitted."""

import functools
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from data.columns import ROLLOUTS
from data.config import EnvironmentConfig, Generation, PromptsConfig, SamplingConfig
from data.ids import child, root_id
from data.manifest import Manifest
from data.prompts import DEMONSTRATION, Prompt, PromptSource, load_source
from data.seeds import derive
from data.user_code import load
from infra import handover
from models.agents.loop import Play, Rules, Trajectory
from models.engines.contract import RolloutEngine, SamplingParams
from models.environments.contract import Episode
from models.environments.spec import EnvironmentSpec
from models.environments.worlds import Environments, Unanswered
from ops.metrics import rollout_metrics
from tasks.rollout_rows import Producer, row
from tasks.step import Job, Pending, Run, Step, perform, unless_given

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

STEP = Step("generate", version=1, kind="rollouts")
log = logging.getLogger("rollbook")
source_of = functools.lru_cache(maxsize=8)(load_source)


class EnvironmentsFailed(RuntimeError):
    """Not one trajectory of a step could be played."""


@dataclass(frozen=True)
class Played:
    """What answers the policy, and how long."""

    spec: EnvironmentSpec
    config: EnvironmentConfig


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


def played_in(config: EnvironmentConfig) -> Played | None:
    """None for a config without an environment. Raises UserCodeError for a user's file that cannot be read."""
    if config.kind is None:
        return None
    kind, *tools = (load(name) if ":" in name else name for name in (config.kind, *config.tools))
    return Played(EnvironmentSpec(kind, tuple(tools), config.options, config.announce), config)


@unless_given(STEP)
def generate(run: Run, iteration: int, policy: Manifest | Pending, generation: Generation) -> Manifest | Pending:
    """Rollouts of the next `prompts.per_iteration` prompts under `policy`, `samples_per_prompt` siblings each."""
    prompts = generation.prompts
    draw = Draw("train", iteration * prompts.per_iteration, prompts.per_iteration, prompts.samples_per_prompt)
    return roll_out(run, STEP, iteration, policy, draw, generation)


def roll_out(
    run: Run,
    step: Step,
    iteration: int,
    policy: Manifest | Pending,
    draw: Draw,
    generation: Generation,
) -> Manifest | Pending:
    """Rollouts of the prompts that `draw` names; also how evaluation generates."""
    prompts, played = generation.prompts, played_in(generation.environment)
    source = source_of(prompts)
    config = {
        "prompts": {"system": prompts.system, "samples_per_prompt": prompts.samples_per_prompt},
        "draw": draw.keyed(),
        "sampling": generation.sampling.semantic(),
        "engine": generation.engine.semantic(),
    }
    config |= {"environment": generation.environment.semantic()} if played else {}
    seed = derive(run.seed, step.name, iteration) if draw.purpose == "train" else derive(run.seed, step.name)
    return perform(
        run,
        step,
        iteration,
        {"policy": policy, "prompts": source.digest if draw.purpose == "train" else source.held_out_digest},
        config,
        seed,
        run.engine,
        _generate,
        (draw, prompts, generation.sampling, played, run.seed, run.hands_over),
        played.spec.code if played else {},
    )


def _generate(
    engine: RolloutEngine,
    job: Job,
    draw: Draw,
    prompts: PromptsConfig,
    sampling: SamplingConfig,
    played: Played | None,
    order_seed: int,
    handed_over: bool,
) -> Manifest:
    """handed_over: the trainer may have left the policy in memory."""
    from models.tokenizer import Tokenizer

    policy = job.input("policy")
    in_memory = handover.offered(policy.content_digest) if handed_over else None
    folder = in_memory or job.folder("policy")
    tokenizer = Tokenizer(folder)
    clock = time.perf_counter()
    engine.update_weights(folder, policy.policy_version, policy.content_digest, in_memory is not None)
    sync_s = time.perf_counter() - clock
    source = source_of(prompts)
    trajectories = _trajectories(_roots(source, draw, order_seed), draw.samples, job.seed)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
        stop=tuple(sampling.stop),
    )
    started, clock = datetime.now(UTC), time.perf_counter()
    play(engine, tokenizer, params, played, trajectories)
    seconds = time.perf_counter() - clock
    producer = Producer(engine.name, engine.version, engine.logprob_semantics(params), tokenizer, sampling)
    rows = [row(trajectory, draw.purpose, producer, started) for trajectory in trajectories]
    attempt = job.attempt()
    version = policy.policy_version
    attempt.add_table("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS), policy_version=version)
    return attempt.commit(
        metrics=_metrics(trajectories, seconds) | {"generate/sync_s": sync_s},
        facts={
            "cursor": {"start": draw.cursor, "end": draw.cursor + draw.count},
            "duplicates": source.duplicates,
            "policy_version": version,
            "device": engine.health().device,
        },
    )


def play(
    engine: RolloutEngine,
    tokenizer: "Tokenizer",
    params: SamplingParams,
    played: Played | None,
    trajectories: list[Trajectory],
) -> None:
    """Raises EnvironmentsFailed if not one trajectory could be played."""
    if played is None:
        return Play(engine, tokenizer, params, Unanswered(), Rules()).run(trajectories)
    if tokenizer.rewrites_history:
        log.warning("the chat template shows earlier turns otherwise than they were sampled; streams keep what was")
    worlds = Environments(played.spec, played.config.timeout_s)
    rules = Rules(played.config.max_turns, played.config.in_flight)
    Play(engine, tokenizer, params, worlds, rules).run(trajectories)
    if all(trajectory.status == "failed" for trajectory in trajectories):
        raise EnvironmentsFailed(
            f"all {len(trajectories)} trajectories failed, the first one by: {trajectories[0].error}; nothing can be "
            "learned from them: mend the environment"
        )


def _metrics(trajectories: list[Trajectory], seconds: float) -> dict[str, float]:
    turns = np.array([trajectory.stream.turns for trajectory in trajectories])
    lengths = np.array([int(trajectory.stream.action_mask.sum()) for trajectory in trajectories])
    truncated = np.array([trajectory.status == "truncated" for trajectory in trajectories])
    tokens, failed = float(lengths.sum()), sum(trajectory.status == "failed" for trajectory in trajectories)
    return rollout_metrics(lengths, truncated, turns) | {
        "generate/tokens": tokens,
        "generate/tokens_per_s": tokens / seconds,
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


def episode_of(name: str, prompt: Prompt, seed: int) -> Episode:
    """What a trajectory starts from; its metadata is all that scorers and environments learn of the prompt."""
    metadata = {key: value for key, value in prompt.metadata.items() if key != DEMONSTRATION}
    return Episode(name, tuple(prompt.messages), metadata | {"prompt_id": prompt.prompt_id}, seed)
