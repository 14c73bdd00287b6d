"""Scalar rewards onto tokens, and the reward of answers that ran out of room."""

import numpy as np
import pyarrow as pa

from ops.ragged import Ragged, from_arrow, to_arrow

TRUNCATION_MODES = ("keep", "zero", "soft")


def scored(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A reward column -> [rows] float64, NaN where scoring failed.

    Raises ValueError for null rewards: null means not scored yet, and numpy would turn it into NaN, which means failed.
    """
    if column.null_count:
        raise ValueError(f"reward: {column.null_count} of {len(column)} not scored yet; run the score step first")
    return column.to_numpy().astype(np.float64)


def scatter(
    rewards: np.ndarray,
    action_mask: pa.ListArray | pa.ChunkedArray,
    token_rewards: pa.ListArray | pa.ChunkedArray | None = None,
) -> tuple[pa.ListArray, int]:
    """One reward per trajectory onto its last action token, plus optional per-token rewards.

    rewards [rows] float; action_mask list<bool>; token_rewards list<float>, of any tokens: one that lies on a token
    which the policy did not sample moves to the last action token before it (to the first one if none is before it), so
    that the sum of a row's rewards is preserved. A row with a non-finite reward (a failed scorer) gets zeros only.

    Returns (list<float32> over the full stream, number of rows whose finite reward found no action token).
    Raises ValueError for lengths that differ, naming the argument. Source: math.md 2.
    """
    mask = from_arrow(action_mask, "action_mask")
    rewards = np.asarray(rewards, np.float64)
    if rewards.shape != (len(mask),):
        raise ValueError(f"rewards: shape {rewards.shape} for {len(mask)} rows of action_mask; they need one per row")
    placed = np.zeros(len(mask.values), np.float64)
    last = last_action(mask)
    finite = np.isfinite(rewards)
    here = finite & (last >= 0)
    placed[last[here]] = rewards[here]
    if token_rewards is not None:
        _add_token_rewards(placed, from_arrow(token_rewards, "token_rewards"), mask, finite)
    unplaced = int((finite & (last < 0)).sum())
    return to_arrow(mask.like(placed.astype(np.float32)), pa.float32()), unplaced


def _add_token_rewards(placed: np.ndarray, extra: Ragged, mask: Ragged, finite: np.ndarray) -> None:
    if not np.array_equal(extra.offsets, mask.offsets):
        raise ValueError(
            "token_rewards: its rows differ in length from action_mask's; both need the full stream's length"
        )
    home = _nearest_action(mask)
    use = np.repeat(finite, mask.lengths) & (home >= 0)
    np.add.at(placed, home[use], extra.values[use].astype(np.float64))


def last_action(mask: Ragged) -> np.ndarray:
    """[rows] int64: flat index of each row's last action token, -1 for a row without one."""
    actions = np.flatnonzero(mask.values)
    ends = np.searchsorted(actions, mask.offsets[1:])
    has = ends > np.searchsorted(actions, mask.offsets[:-1])
    last = np.full(len(mask), -1, np.int64)
    last[has] = actions[ends[has] - 1]
    return last


def _nearest_action(mask: Ragged) -> np.ndarray:
    """[tokens] int64: the last action token at or before each token, else the row's first, -1 in a row without any."""
    actions = np.flatnonzero(mask.values)
    begins = np.searchsorted(actions, mask.offsets[:-1])
    has = np.searchsorted(actions, mask.offsets[1:]) > begins
    first = np.full(len(mask), -1, np.int64)
    first[has] = actions[begins[has]]
    before = np.where(mask.values, np.arange(len(mask.values)), -1)
    np.maximum.accumulate(before, out=before)
    # What lies before the row's first action token would belong to an earlier row.
    nearest = np.maximum(before, np.repeat(first, mask.lengths))
    return np.where(np.repeat(has, mask.lengths), nearest, -1)


def shape_truncated(
    rewards: np.ndarray,
    lengths: np.ndarray,
    max_new_tokens: int,
    truncated: np.ndarray,
    mode: str,
    buffer: int = 4096,
    factor: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The reward of long answers: `keep` it, `zero` it where the answer was cut, or `soft`: take a growing penalty.

    rewards [rows] float (NaN: failed, stays NaN); lengths [rows] L, response tokens; max_new_tokens M; truncated [rows]
    bool, finish_reason = length. soft, for every row: r + min(-(L - (M - buffer)) / buffer * factor, 0).

    Returns (shaped [rows] float64, penalty [rows] float64 with shaped = rewards + penalty, 0 for failed rows).
    Raises ValueError for an unknown mode, a buffer below 1 or unequal lengths. Source: DAPO 2503.14476; math.md 2.
    """
    rewards, lengths = np.asarray(rewards, np.float64), np.asarray(lengths)
    if mode not in TRUNCATION_MODES:
        raise ValueError(f"mode {mode!r}: it must be one of {', '.join(TRUNCATION_MODES)}")
    if buffer < 1:
        raise ValueError(f"buffer {buffer}: it must be at least 1 token")
    if not rewards.shape == lengths.shape == np.shape(truncated):
        raise ValueError(
            f"lengths {lengths.shape}, truncated {np.shape(truncated)}: must be as rewards {rewards.shape}"
        )
    penalty = np.zeros(len(rewards))
    if mode == "zero":
        penalty = np.where(truncated, -rewards, 0.0)
    if mode == "soft":
        penalty = np.minimum(-(lengths - (max_new_tokens - buffer)) / buffer * factor, 0.0)
    penalty = np.where(np.isfinite(rewards), penalty, 0.0)
    return rewards + penalty, penalty
