"""train: state + rollouts + replays + advantages -> state k+1. `epochs` passes over disjoint mini-batches."""

import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from data.config import CriticConfig, TrainConfig
from data.manifest import Manifest
from data.seeds import derive
from models.megatron.contract import NonFiniteLoss, Setup, TrainBatch, TrainOptions
from ops.packing import mini_batches, pack
from ops.ragged import Ragged, from_arrow
from tasks.replay import bring
from tasks.step import Job, Pending, Run, Step, perform, require_same_rows

if TYPE_CHECKING:
    from models.megatron.trainer import Trainer

STEP = Step("train", version=1, kind="state")


class TrainingDiverged(RuntimeError):
    """A loss or gradient that is not finite; the message names iteration, optimizer step and trajectories."""


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
) -> Manifest | Pending:
    """The training state after this iteration's optimizer steps."""
    options = TrainOptions(config, temperature, policy_frozen=iteration < critic.warmup_iterations)
    read = {
        "train": config.semantic(),
        "critic": critic.semantic(),
        "temperature": temperature,
        "policy_frozen": options.policy_frozen,
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
        (options, Setup(critic, config.optimizer)),
    )


def _train(trainer: "Trainer", job: Job, options: TrainOptions, setup: Setup) -> Manifest | None:
    rollouts = job.table("rollouts", ["trajectory_id", "token_ids", "action_mask", "rollout_logprobs"])
    replays = job.table("replays")
    bring(trainer, job, setup)
    advantages = job.table("advantages")
    batch = _batch(rollouts, replays, advantages, setup, options)
    excluded = advantages["excluded"].to_numpy()
    plan = _plan(replays, excluded, batch.streams.lengths, options, job.seed)
    try:
        updates = trainer.train(batch, plan, options)
    except NonFiniteLoss as error:
        names = [str(rollouts["trajectory_id"][row]) for row in error.rows[:5]]
        raise TrainingDiverged(
            f"iteration {job.address.iteration}, optimizer step {error.step}: the {error.what} is not finite, in the "
            f"mini-batch of {len(error.rows)} trajectories from {', '.join(names)}; look at their rewards and "
            "log-probs (`rollbook show`), then lower the lr or train.optimizer.max_grad_norm under a new run name"
        ) from error
    with TemporaryDirectory(prefix="rollbook-state-") as folder:
        digest = trainer.save_state(Path(folder))
        if not trainer.is_first:
            return None
        attempt = job.attempt()
        attempt.add_folder(Path(folder))
        steps = 0 if options.policy_frozen else len(updates)
        return attempt.commit(
            content_digest=digest,
            metrics=_over_updates(updates),
            facts={
                "policy_version": job.input("state").policy_version + steps,
                "updates": updates,
            },
        )


def _over_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps; of minima and maxima the extreme; of rates and counters the last."""
    merged = {}
    for name in updates[0]:
        series = [update[name] for update in updates if name in update]
        merged[name] = _merge(name)(series)
    return merged


def _merge(name: str) -> Callable[[list[float]], float]:
    if name.endswith("/min"):
        return min
    if name.endswith("/max"):
        return max
    return (lambda series: series[-1]) if name in ("lr", "critic_lr", "head_lr") else statistics.fmean


def _batch(
    rollouts: pa.Table, replays: pa.Table, advantages: pa.Table, setup: Setup, options: TrainOptions
) -> TrainBatch:
    require_same_rows(rollouts, replays, advantages)
    old = rollouts["rollout_logprobs"] if options.train.old_logp_source == "rollout" else replays["old_logprobs"]
    with_values = setup.critic.kind != "none"
    return TrainBatch(
        streams=from_arrow(rollouts["token_ids"], "token_ids"),
        action_mask=from_arrow(rollouts["action_mask"], "action_mask"),
        loss_mask=from_arrow(advantages["loss_mask"], "loss_mask"),
        old_logprobs=from_arrow(old, "old_logprobs"),
        advantages=from_arrow(advantages["token_advantages"], "token_advantages"),
        returns=_optional(advantages, "returns", with_values),
        old_values=_optional(replays, "values", with_values),
    )


def _optional(table: pa.Table, column: str, wanted: bool) -> Ragged | None:
    return from_arrow(table[column], column) if wanted else None


def _plan(
    replays: pa.Table, excluded: np.ndarray, lengths: np.ndarray, options: TrainOptions, seed: int
) -> list[list[np.ndarray]]:
    """[optimizer step][micro-batch] row numbers: replay's grouping first, then a fresh seeded shuffle each epoch.

    Excluded rows leave the batch, and with them what is left empty. Raises ValueError if no row stays.
    """
    kept = np.flatnonzero(~excluded)
    if not len(kept):
        raise ValueError(
            f"all {len(excluded)} trajectories are excluded: there is nothing to learn from; see the scorer's "
            "errors with `rollbook show RUN --iteration K --trajectory ID`"
        )
    mini, micro = replays["mini_batch"].to_numpy()[kept], replays["micro_batch"].to_numpy()[kept]
    plan = [[kept[(mini == i) & (micro == j)] for j in np.unique(micro[mini == i])] for i in np.unique(mini)]
    for epoch in range(1, options.train.epochs):
        for rows in mini_batches(len(kept), options.train.mini_batch, derive(seed, "epoch", epoch)):
            plan.append(pack(lengths, kept[rows], options.train.micro_tokens))
    return plan
