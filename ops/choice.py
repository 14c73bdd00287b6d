"""Which groups of trajectories people are shown where all would be too many."""

import math

import numpy as np

_DECIMALS = 9  # 0.07 * 100 is 7.000000000000001


def chosen_rows(groups: np.ndarray, rewards: np.ndarray, share: float) -> np.ndarray:
    """[rows] bool: whole groups, ceil(share * groups) of them; the same for the same arguments.

    groups: [rows] int64, 0 to n - 1 as `ops.groups.group_numbers` gives them. rewards: [rows] float, NaN where there is
    none. The groups of the (first) best and worst reward are always among them, even if they are more than the share;
    the others are spread evenly over the order. A share of 0 chooses nothing. Raises ValueError outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share {share}: it must lie in [0, 1]")
    chosen = np.zeros(int(groups.max()) + 1 if len(groups) else 0, bool)
    wanted = math.ceil(round(share * len(chosen), _DECIMALS))
    if wanted == 0:
        return np.zeros(len(groups), bool)
    if np.isfinite(rewards).any():
        finite = np.where(np.isfinite(rewards), rewards, np.nan)
        chosen[[groups[np.nanargmax(finite)], groups[np.nanargmin(finite)]]] = True
    others, more = np.flatnonzero(~chosen), max(wanted - int(chosen.sum()), 0)
    chosen[others[(np.arange(more) * 2 + 1) * len(others) // (2 * more)] if more else []] = True
    return chosen[groups]
