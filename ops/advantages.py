"""From scored trajectories to the columns of the advantages table, by the estimator that the config names.

To add an estimator: write a function (AdvantageBatch, AdvantageOptions) -> Estimate and give it a name in ESTIMATORS.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ops.gae import ListColumn, gae, turn_gae
from ops.groups import global_, group, group_center, group_numbers, statistics
from ops.masked import row_means, spread, whiten
from ops.ragged import Ragged, from_arrow, row_sums, to_arrow
from ops.rewards import scatter

StringColumn = pa.Array | pa.ChunkedArray


@dataclass(frozen=True)
class AdvantageOptions:
    """The fields of data.config.AdvantageConfig, the estimator's name apart; see there."""

    gamma: float = 1.0
    lam: float = 0.95
    lam_critic: float | None = None
    length_alpha: float | None = None
    bootstrap_truncated: bool = False
    whiten: bool = False
    std: str = "population"
    mask_truncated: bool = False
    eps: float = 1e-6
    step_unit: str = "token"


@dataclass(frozen=True)
class AdvantageBatch:
    """Scored trajectories, in any order; list columns over the full stream.

    `rewards` are totals; `token_rewards` say where parts of them were earned, the rest at the last action token. An
    estimator sees the batch with `rewards` NaN for every excluded trajectory and `token_rewards` final: parts and rest,
    which add up to the total.
    """

    trajectory_id: StringColumn  # [rows]
    group_id: StringColumn  # [rows] siblings share it
    purpose: StringColumn  # [rows] train, baseline or eval; only train is trained on and enters any statistic
    rewards: np.ndarray  # [rows] float64, NaN: failed
    truncated: np.ndarray  # [rows] bool, the answer was cut
    action_mask: ListColumn  # list<bool>
    token_rewards: ListColumn | None = None  # list<float>, parts of `rewards`
    values: ListColumn | None = None  # list<float>
    bootstrap_values: np.ndarray | None = None  # [rows] float, read where truncated

    def groups(self) -> np.ndarray:
        """[rows] int64 group numbers."""
        return group_numbers(self.group_id)


@dataclass(frozen=True)
class Estimate:
    """What an estimator returns: list<float32> over the full stream, 0 at non-action tokens."""

    token_advantages: pa.ListArray
    returns: pa.ListArray | None = None  # None: no critic


Estimator = Callable[[AdvantageBatch, AdvantageOptions], Estimate]


@dataclass(frozen=True)
class AdvantageColumns:
    """The columns of the advantages table, and how many rewards found no action token."""

    trajectory_id: StringColumn
    token_rewards: pa.ListArray  # list<float32>
    token_advantages: pa.ListArray  # list<float32>
    returns: pa.ListArray | None  # list<float32>
    loss_mask: pa.ListArray  # list<bool>
    advantage: np.ndarray  # [rows] float32, mean over the loss_mask tokens
    group_id: StringColumn
    group_mean: np.ndarray  # [rows] float32, NaN where the group has no finite reward
    group_std: np.ndarray  # [rows] float32, likewise
    group_finite: np.ndarray  # [rows] int32
    excluded: np.ndarray  # [rows] bool
    reason: pa.StringArray  # [rows] why it is excluded, else null
    unplaced: int

    def table(self) -> pa.Table:
        """The columns in schema order, `returns` all null without a critic."""
        names = [name for name in self.__dataclass_fields__ if name != "unplaced"]
        columns = {name: getattr(self, name) for name in names}
        if self.returns is None:
            columns["returns"] = pa.nulls(len(self.advantage), pa.list_(pa.float32()))
        return pa.table(columns)


def _estimate_gae(batch: AdvantageBatch, options: AdvantageOptions) -> Estimate:
    bootstrap = _bootstrap(batch) if options.bootstrap_truncated else None
    steps = {"token": gae, "turn": turn_gae}
    return Estimate(
        *steps[options.step_unit](
            batch.token_rewards,
            batch.values,
            batch.action_mask,
            gamma=options.gamma,
            lam=options.lam,
            lam_critic=options.lam_critic,
            length_alpha=options.length_alpha,
            bootstrap_values=bootstrap,
        )
    )


def _bootstrap(batch: AdvantageBatch) -> np.ndarray:
    if batch.bootstrap_values is None:
        raise ValueError("bootstrap_values: missing; bootstrap_truncated needs the values after truncated answers")
    return np.where(batch.truncated & np.isfinite(batch.rewards), batch.bootstrap_values, 0.0)


def _estimate_group(batch: AdvantageBatch, options: AdvantageOptions) -> Estimate:
    return Estimate(spread(group(batch.rewards, batch.groups(), std=options.std, eps=options.eps), batch.action_mask))


def _estimate_group_center(batch: AdvantageBatch, options: AdvantageOptions) -> Estimate:
    return Estimate(spread(group_center(batch.rewards, batch.groups()), batch.action_mask))


def _estimate_global(batch: AdvantageBatch, options: AdvantageOptions) -> Estimate:
    return Estimate(spread(global_(batch.rewards, std=options.std, eps=options.eps), batch.action_mask))


ESTIMATORS: dict[str, Estimator] = {
    "gae": _estimate_gae,
    "group": _estimate_group,
    "group_center": _estimate_group_center,
    "global": _estimate_global,
}


def estimate(name: str, batch: AdvantageBatch, options: AdvantageOptions) -> AdvantageColumns:
    """The advantages table of a batch.

    Failed trajectories (reward not finite) and those of another purpose than train are excluded: advantage, return and
    loss_mask 0, in no statistic. `mask_truncated` takes truncated ones out of the loss, but not out of the statistics.
    Then whitening over the loss_mask tokens if asked for, and the mean of each trajectory over its loss_mask tokens.

    Raises ValueError for an unknown name (with the nearest one), columns of unequal length, and what the estimator
    refuses. Source: math.md 2-4.
    """
    estimator = _find(name)
    _check_rows(batch)
    reason = _reasons(batch)
    excluded = reason.is_valid().to_numpy(zero_copy_only=False)
    prepared, unplaced = _prepare(batch, excluded)
    found = estimator(prepared, options)
    loss_mask = _loss_mask(batch, excluded, options)
    advantages = _without(found.token_advantages, excluded, "token_advantages")
    if options.whiten:
        advantages = advantages.like(whiten(advantages.values, loss_mask.values, eps=options.eps))
    returns = None if found.returns is None else _without(found.returns, excluded, "returns")
    groups = batch.groups()
    seen = statistics(prepared.rewards, groups, options.std)
    return AdvantageColumns(
        trajectory_id=batch.trajectory_id,
        token_rewards=prepared.token_rewards,
        token_advantages=to_arrow(advantages, pa.float32()),
        returns=None if returns is None else to_arrow(returns, pa.float32()),
        loss_mask=to_arrow(loss_mask, pa.bool_()),
        advantage=row_means(advantages, loss_mask).astype(np.float32),
        group_id=batch.group_id,
        group_mean=seen.mean[groups].astype(np.float32),
        group_std=seen.std[groups].astype(np.float32),
        group_finite=seen.finite[groups].astype(np.int32),
        excluded=excluded,
        reason=reason,
        unplaced=unplaced,
    )


def _find(name: str) -> Estimator:
    if name not in ESTIMATORS:
        near = difflib.get_close_matches(name, ESTIMATORS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"estimator {name!r}: it must be one of {', '.join(ESTIMATORS)}{hint}")
    return ESTIMATORS[name]


def _check_rows(batch: AdvantageBatch) -> None:
    for name, column in vars(batch).items():
        if column is not None and len(column) != len(batch.trajectory_id):
            raise ValueError(f"{name}: {len(column)} rows for {len(batch.trajectory_id)} trajectories; join them first")


def _reasons(batch: AdvantageBatch) -> pa.StringArray:
    """[rows] why a trajectory is left out, null for those that stay."""
    purposes = pc.cast(batch.purpose, pa.string()).to_pylist()
    failed = ~np.isfinite(batch.rewards)
    reasons = [
        f"purpose {purpose}" if purpose != "train" else "failed" if fail else None
        for purpose, fail in zip(purposes, failed, strict=True)
    ]
    return pa.array(reasons, pa.string())


def _prepare(batch: AdvantageBatch, excluded: np.ndarray) -> tuple[AdvantageBatch, int]:
    """The batch as estimators see it, and the number of rewards that found no token."""
    rewards = np.where(excluded, np.nan, batch.rewards)
    rest = rewards
    if batch.token_rewards is not None:
        rest = rewards - row_sums(from_arrow(batch.token_rewards, "token_rewards"))
    placed, unplaced = scatter(rest, batch.action_mask, batch.token_rewards)
    return replace(batch, rewards=rewards, token_rewards=placed), unplaced


def _loss_mask(batch: AdvantageBatch, excluded: np.ndarray, options: AdvantageOptions) -> Ragged:
    mask = from_arrow(batch.action_mask, "action_mask")
    out = excluded | batch.truncated if options.mask_truncated else excluded
    return mask.like(mask.values & ~np.repeat(out, mask.lengths))


def _without(column: pa.ListArray, excluded: np.ndarray, name: str) -> Ragged:
    """The column with zeros in the excluded rows, whatever the estimator made of them."""
    tokens = from_arrow(column, name)
    return tokens.like(np.where(np.repeat(excluded, tokens.lengths), np.float32(0), tokens.values))
