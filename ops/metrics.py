"""The metrics that every iteration carries (math.md 7), as far as they come from arrays and tables.

Each function returns {name: value}. Statistics are of the population, over what is finite and inside the mask; a metric
that has nothing to measure is left out, since 0 would be a lie and NaN is not JSON.
"""

import numpy as np

from ops.groups import statistics
from ops.ragged import Ragged

# A group whose rewards differ by no more than rounding teaches nothing: std at most this.
ZERO_STD = 1e-8


def describe(name: str, values: np.ndarray, *kinds: str) -> dict[str, float]:
    """{name/kind: statistic} of the finite values; kinds among mean, std, min, max (none given: all)."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return {}
    functions = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    return {f"{name}/{kind}": float(functions[kind](finite)) for kind in kinds or functions}


def reward_metrics(rewards: np.ndarray, components: dict[str, np.ndarray] | None = None) -> dict[str, float]:
    """rewards [rows] float, non-finite: failed; components {name: [rows] float}, NaN where a row lacks one."""
    metrics = describe("reward", rewards)
    for name, values in (components or {}).items():
        metrics |= describe(f"reward/{name}", values)
    return metrics | {"reward/failed": float((~np.isfinite(rewards)).sum())}


def group_metrics(rewards: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """How many groups have two or more finite rewards, and how many and which share of these have a std of 0.

    rewards [rows] float, groups [rows] int64 group numbers.
    """
    seen = statistics(rewards, groups)
    compared = seen.finite >= 2
    flat = int((seen.std[compared] <= ZERO_STD).sum())
    metrics = {"groups/count": float(compared.sum()), "groups/zero_std": float(flat)}
    return metrics | ({"groups/zero_std_ratio": flat / int(compared.sum())} if compared.any() else {})


def rollout_metrics(lengths: np.ndarray, truncated: np.ndarray, turns: np.ndarray) -> dict[str, float]:
    """lengths [rows] sampled tokens; truncated [rows] bool; turns [rows] generated turns."""
    metrics = describe("response_length", lengths, "mean", "max") | describe("turns", turns, "mean", "max")
    if len(truncated):
        metrics["truncated/ratio"] = float(np.mean(truncated))
    counts = zip(*np.unique(turns, return_counts=True), strict=True)
    return metrics | {f"turns/count_{int(turn)}": float(rows) for turn, rows in counts}


def advantage_metrics(
    advantages: Ragged,
    loss_mask: Ragged,
    values: Ragged | None = None,
    returns: Ragged | None = None,
    value_mask: Ragged | None = None,
) -> dict[str, float]:
    """Of the loss_mask tokens: advantages and, with a critic, values, returns and the explained variance.

    The last three of those in value_mask too; None: all.
    """
    metrics = describe("advantage", advantages.values[loss_mask.values], "mean", "std")
    if values is None or returns is None:
        return metrics
    kept = loss_mask.values if value_mask is None else loss_mask.values & value_mask.values
    kept_values, kept_returns = values.values[kept], returns.values[kept]
    metrics |= describe("value", kept_values, "mean") | describe("return", kept_returns, "mean")
    if len(kept_returns):
        metrics["value/explained_variance"] = explained_variance(kept_values, kept_returns)
    return metrics


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - var(R - V) / var(R), population, [n] each; 0 if all returns are equal. Source: math.md 5."""
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    if not len(returns) or (returns == returns[0]).all():
        return 0.0
    return float(1.0 - np.var(returns - values) / np.var(returns))


def reward_shift(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """How rewards moved from one scorer to another: [rows] float each, non-finite where the scorer failed.

    Means are of each one's finite rewards; share changed, and Pearson's correlation, of the rows that both scored.
    """
    both = np.isfinite(before) & np.isfinite(after)
    found = {f"reward/{name}": float(np.mean(r[np.isfinite(r)])) for name, r in _named(before, after) if _any(r)}
    found |= {f"reward/failed_{name}": float((~np.isfinite(r)).sum()) for name, r in _named(before, after)}
    if both.any():
        found["reward/changed"] = float(np.mean(before[both] != after[both]))
    return found | _correlation("reward", before[both], after[both])


def advantage_shift(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """How advantages moved: [tokens] float each, of the tokens in both losses. Flipped: of those not 0 in both."""
    if not len(before):
        return {}
    told = (before != 0) & (after != 0)
    found = {"advantage/mean_move": float(np.mean(np.abs(after - before)))}
    if told.any():
        found["advantage/flipped"] = float(np.mean(np.sign(before[told]) != np.sign(after[told])))
    return found | _correlation("advantage", before, after)


def _named(before: np.ndarray, after: np.ndarray) -> list[tuple[str, np.ndarray]]:
    return [("before", before), ("after", after)]


def _any(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())


def _correlation(name: str, before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Of two series of which neither is constant; else there is none."""
    if len(before) < 2 or np.std(before) <= ZERO_STD or np.std(after) <= ZERO_STD:
        return {}
    return {f"{name}/correlation": float(np.corrcoef(before, after)[0, 1])}
