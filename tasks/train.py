"""train: state + rollouts + replays + advantages -> state k+1. `epochs` passes over disjoint mini-batches."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from data.config import CheckpointConfig, CriticConfig, TrainConfig
from data.manifest import Manifest
from data.seeds import derive
from models.megatron.contract import BeyondLimit, Setup, SickStep, TrainOptions
from tasks.state import bring, copy, keep_behind
from tasks.step import Job, Pending, Run, Step, perform, unless_given
from tasks.updates import ROLLOUT_COLUMNS, Lessons

if TYPE_CHECKING:
    from models.megatron.trainer import Trainer

STEP = Step("train", version=1, kind="state")


class TrainingDiverged(RuntimeError):
    """Training would spoil the policy; the message names iteration, optimizer step and trajectories to look at."""


@unless_given(STEP)
def train(
    run: Run,
    iteration: int,
    state: Manifest | Pending,
    rollouts: Manifest | Pending,
    replays: Manifest | Pending,
    advantages: Manifest | Pending,
    temperature: float,
    config: TrainConfig,
    critic: CriticConfig,
    step_unit: str = "token",
) -> Manifest | Pending:
    """The training state after this iteration's optimizer steps. step_unit: of the advantages."""
    options = TrainOptions(config, temperature, iteration < critic.warmup_iterations, step_unit)
    setup = Setup(critic, config.optimizer, config.recompute)
    read = {
        "train": config.semantic(),
        "critic": critic.semantic(),
        "temperature": temperature,
        "policy_frozen": options.policy_frozen,
        **({} if step_unit == "token" else {"step_unit": step_unit}),  # records from before the setting lack it
    }
    return perform(
        run,
        STEP,
        iteration,
        {"state": state, "rollouts": rollouts, "replays": replays, "advantages": advantages},
        read,
        derive(run.seed, STEP.name, iteration),
        run.trainer,
        _train,
        (options, setup, run.checkpoint if run.keeps_state(iteration) else None),
    )


def _train(
    trainer: "Trainer", job: Job, options: TrainOptions, setup: Setup, checkpoint: CheckpointConfig | None
) -> Manifest | None:
    """checkpoint: which states to keep when this one is written; None: this one is not."""
    lessons = Lessons(job.table("rollouts", ROLLOUT_COLUMNS), job.table("replays"), job.table("advantages"))
    bring(trainer, job, setup)
    started = time.perf_counter()
    try:
        updates = lessons.learn(trainer, options, setup, job.seed)
    except SickStep as error:
        raise _diverged(error, job, lessons) from error
    learn_s = time.perf_counter() - started
    copied = None if checkpoint is None else copy(trainer, job)
    made = _commit(job, trainer, updates, options, learn_s)
    if made is not None and copied is not None and checkpoint is not None:
        keep_behind(job, made, copied, checkpoint)
    return made


def _commit(
    job: Job, trainer: "Trainer", updates: list[dict[str, float]], options: TrainOptions, learn_s: float
) -> Manifest | None:
    digest = trainer.digest  # of all ranks
    if not trainer.is_first:
        return None
    steps = 0 if options.policy_frozen else len(updates)
    return job.attempt().commit(
        content_digest=digest,
        metrics=_over_updates(updates) | {"train/learn_s": learn_s},
        facts={"policy_version": job.input("state").policy_version + steps, "updates": updates},
    )


def _diverged(error: SickStep, job: Job, lessons: Lessons) -> TrainingDiverged:
    fix = "lower train.optimizer.lr or train.optimizer.max_grad_norm under a new run name"
    if isinstance(error, BeyondLimit):
        fix += ", or, if that is no harm, raise the limit: the same run then goes on"
    names = [str(lessons.rollouts["trajectory_id"][row]) for row in error.rows[:5]]
    worst = "the worst " if isinstance(error, BeyondLimit) else ""
    return TrainingDiverged(
        f"iteration {job.address.iteration}, optimizer step {error.step}: {error.what} in {len(error.rows)} "
        f"trajectories, {worst}{', '.join(names)}; look at their rewards and log-probs "
        f"(`rollbook show {job.ledger.run} --trajectory ID`), then {fix}"
    )


def _over_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps; of minima and maxima the extreme; of rates and counters the last."""
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        series = [update[name] for update in updates if name in update]
        merged[name] = _merge(name)(series)
    return merged


def _merge(name: str) -> Callable[[list[float]], float]:
    if name.endswith("/min"):
        return min
    if name.endswith("/max"):
        return max
    return (lambda series: series[-1]) if name in ("lr", "critic_lr", "head_lr") else statistics.fmean
