"""The optimizer steps of one iteration, from its recorded tables: for `train`, and to make an old state again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from data.config import CorrectionConfig
from data.seeds import derive
from models.megatron.contract import Setup, TrainBatch, TrainOptions
from ops.importance import Corrected, CorrectionOptions, correct
from ops.packing import mini_batches, pack
from ops.ragged import Ragged, from_arrow
from ops.turns import value_mask
from tasks.mismatch import require_comparable
from tasks.step import require_same_rows

if TYPE_CHECKING:
    from models.megatron.trainer import Trainer

ROLLOUT_COLUMNS = ["trajectory_id", "token_ids", "action_mask", "rollout_logprobs", "sampling"]


@dataclass(frozen=True)
class Lessons:
    """What an iteration learns from: rollouts (ROLLOUT_COLUMNS), replays and advantages of the same rows."""

    rollouts: pa.Table
    replays: pa.Table
    advantages: pa.Table

    def learn(self, trainer: "Trainer", options: TrainOptions, setup: Setup, seed: int) -> list[dict[str, float]]:
        """Takes every optimizer step; metrics of each.

        Raises SickStep; ValueError if no row is left to learn from, or if log-probs that are to be compared are not of
        one distribution.
        """
        require_same_rows(self.rollouts, self.replays, self.advantages)
        require_comparable(self.rollouts, options.train)
        corrected = self._corrected(options.train.correction)
        batch = self._batch(setup, options, corrected)
        plan = _plan(self.replays, self.advantages["excluded"].to_numpy(), batch.streams.lengths, options, seed)
        updates = trainer.train(batch, plan, options)
        if corrected is None:
            return updates
        steps = [np.concatenate(rows) for rows in plan]
        return [u | corrected.metrics(batch.loss_mask, rows) for u, rows in zip(updates, steps, strict=True)]

    def _batch(self, setup: Setup, options: TrainOptions, corrected: Corrected | None) -> TrainBatch:
        rollouts, replays, advantages = self.rollouts, self.replays, self.advantages
        old = rollouts["rollout_logprobs"] if options.train.old_logp_source == "rollout" else replays["old_logprobs"]
        with_values = setup.critic.kind != "none"
        actions = from_arrow(rollouts["action_mask"], "action_mask")
        return TrainBatch(
            streams=from_arrow(rollouts["token_ids"], "token_ids"),
            action_mask=actions,
            loss_mask=from_arrow(advantages["loss_mask"], "loss_mask"),
            old_logprobs=from_arrow(old, "old_logprobs"),
            advantages=from_arrow(advantages["token_advantages"], "token_advantages"),
            returns=_optional(advantages, "returns", with_values),
            old_values=_optional(replays, "values", with_values),
            weights=None if corrected is None else corrected.weights,
            value_mask=value_mask(actions, options.step_unit) if with_values else None,
        )

    def _corrected(self, config: CorrectionConfig) -> Corrected | None:
        if config.kind == "none":
            return None
        return correct(
            from_arrow(self.replays["old_logprobs"], "old_logprobs"),
            from_arrow(self.rollouts["rollout_logprobs"], "rollout_logprobs"),
            from_arrow(self.rollouts["action_mask"], "action_mask"),
            CorrectionOptions(**config.semantic()),
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
            f"all {len(excluded)} trajectories are excluded: there is nothing to learn from; `rollbook show RUN "
            "--iteration K` lists the scorer's errors; after mending it, take a new run name"
        )
    mini, micro = replays["mini_batch"].to_numpy()[kept], replays["micro_batch"].to_numpy()[kept]
    plan = [[kept[(mini == i) & (micro == j)] for j in np.unique(micro[mini == i])] for i in np.unique(mini)]
    for epoch in range(1, options.train.epochs):
        for rows in mini_batches(len(kept), options.train.mini_batch, derive(seed, "epoch", epoch)):
            plan.append(pack(lengths, kept[rows], options.train.micro_tokens))
    return plan
