"""Generalised advantage estimation over packed trajectories: one compiled pass, no padding, no copy out of Arrow."""

from typing import Any

import numba
import numpy as np
import pyarrow as pa

from ops.ragged import Ragged, flatten, from_arrow, row_sums, to_arrow
from ops.turns import Turns

ListColumn = pa.ListArray | pa.ChunkedArray
NO_VALUES = "values: missing; GAE needs the critic's values, so turn the critic on (critic.kind)"


def gae(
    token_rewards: ListColumn,
    values: ListColumn | None,
    action_mask: ListColumn,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_critic: float | None = None,
    length_alpha: float | None = None,
    bootstrap_values: np.ndarray | None = None,
) -> tuple[pa.ListArray, pa.ListArray]:
    """Advantages and returns of every action token, per trajectory.

    Over the action tokens of one row, backwards (`next` is the next action token; other tokens are skipped, undecayed):

        delta_t = r_t + gamma * V_next - V_t,    A_t = delta_t + gamma * lam * A_next,    R_t = A_t + V_t

    with A = 0 and V = bootstrap_values[row] (0 if not given) after the last one. Options: `lam_critic` is the lam of
    the returns alone (VC-PPO 2503.01491); `length_alpha` replaces lam by max(0, 1 - 1 / (length_alpha * actions)) in
    each row, also in the returns unless lam_critic is given (VAPO 2504.05118).

    token_rewards, values list<float32>, action_mask list<bool>: all over the full stream, sliced or chunked at will.
    values[i] is the value of the state that token i was sampled in. What stands at non-action tokens is never read.
    bootstrap_values [rows] float: the value after the last action token.

    Returns (advantages, returns), list<float32>, 0 at non-action tokens; accumulated in float64.
    Raises ValueError, naming the argument, for missing values, unequal lengths, offsets that decrease, nulls, gamma or
    lam outside [0, 1], length_alpha not above 0, bootstrap values that are not finite.
    Source: GAE 1506.02438; math.md 3.
    """
    _check_fraction("gamma", gamma)
    _check_fraction("lam", lam)
    if values is None:
        raise ValueError(NO_VALUES)
    mask_bits, bit_start, offsets = _mask_bits(action_mask)
    rewards = _tokens("token_rewards", token_rewards, offsets)
    old_values = _tokens("values", values, offsets)
    lams = _lams(lam, lam_critic, length_alpha, action_mask)
    after = _bootstrap(bootstrap_values, len(offsets) - 1)
    out = np.empty((2, offsets[-1]), np.float32)
    _backward(rewards, old_values, mask_bits, bit_start, offsets, float(gamma), gamma * lams, after, out)
    return to_arrow(Ragged(out[0], offsets), pa.float32()), to_arrow(Ragged(out[1], offsets), pa.float32())


def turn_gae(
    token_rewards: ListColumn, values: ListColumn | None, action_mask: ListColumn, **options: Any
) -> tuple[pa.ListArray, pa.ListArray]:
    """`gae` with a turn, a run of action tokens, as the step: of all turns of a row, by the same recurrence.

    A turn's reward is the sum of its tokens', its value that of its first token. All its tokens get its advantage, its
    first one its return, the others the return 0: no value of theirs is learned (see `ops.turns.value_mask`).
    length_alpha counts turns. Arguments, result and errors are as of `gae`. Source: math.md 3.
    """
    if values is None:
        raise ValueError(NO_VALUES)
    turns = Turns(from_arrow(action_mask, "action_mask"))
    rewards = turns.sums(_tokens("token_rewards", token_rewards, turns.mask.offsets))
    old_values = turns.firsts(_tokens("values", values, turns.mask.offsets))
    steps = rewards.like(np.ones(len(rewards.values), bool))
    columns = to_arrow(rewards, pa.float32()), to_arrow(old_values, pa.float32()), to_arrow(steps, pa.bool_())
    advantages, returns = (column.flatten().to_numpy() for column in gae(*columns, **options))
    return to_arrow(turns.spread(advantages), pa.float32()), to_arrow(turns.at_firsts(returns), pa.float32())


@numba.njit(cache=True, nogil=True)
def _backward(
    rewards: np.ndarray,  # [tokens] float32
    values: np.ndarray,  # [tokens] float32
    mask_bits: np.ndarray,  # [bytes] uint8, least significant bit first
    bit_start: int,
    offsets: np.ndarray,  # [rows + 1] int64
    gamma: float,
    decays: np.ndarray,  # [2, rows] float64: gamma * lam of the advantages, of the returns
    after: np.ndarray,  # [rows] float64
    out: np.ndarray,  # [2, tokens] float32: advantages, returns
) -> None:
    for row in range(len(offsets) - 1):
        decay, decay_critic = decays[0, row], decays[1, row]
        next_value, advantage, advantage_critic = after[row], 0.0, 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            bit = bit_start + t
            if (mask_bits[bit >> 3] >> (bit & 7)) & 1:
                value = np.float64(values[t])
                delta = rewards[t] + gamma * next_value - value
                advantage = delta + decay * advantage
                advantage_critic = delta + decay_critic * advantage_critic
                next_value = value
                out[0, t], out[1, t] = advantage, advantage_critic + value
            else:
                out[0, t], out[1, t] = 0.0, 0.0


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} {value}: it must lie in [0, 1]")


def _mask_bits(action_mask: ListColumn) -> tuple[np.ndarray, int, np.ndarray]:
    """-> (Arrow's own bits, index of the first bit, [rows + 1] offsets): the mask without unpacking it."""
    bools, offsets = flatten(action_mask, "action_mask")
    if not pa.types.is_boolean(bools.type):
        raise ValueError(f"action_mask: {action_mask.type}; it must be list<bool>")
    buffer = bools.buffers()[1]
    bits = np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
    return _read_only(bits), bools.offset, offsets


def _tokens(name: str, column: ListColumn, offsets: np.ndarray) -> np.ndarray:
    tokens = from_arrow(column, name)
    if len(tokens) != len(offsets) - 1:
        raise ValueError(f"{name}: {len(tokens)} rows for {len(offsets) - 1} of action_mask; they must be equal")
    if not np.array_equal(tokens.offsets, offsets):
        row = int(np.flatnonzero(tokens.lengths != np.diff(offsets))[0])
        raise ValueError(
            f"{name}: row {row} has {tokens.lengths[row]} tokens, action_mask {np.diff(offsets)[row]}; "
            "every column needs the full stream's length"
        )
    return _read_only(tokens.values.astype(np.float32, copy=False))


def _read_only(array: np.ndarray) -> np.ndarray:
    """Arrow's arrays are read-only; with all inputs so, one compiled version serves every caller."""
    view = array.view()
    view.flags.writeable = False
    return view


def _lams(lam: float, lam_critic: float | None, length_alpha: float | None, action_mask: ListColumn) -> np.ndarray:
    """[2, rows] lam of the advantages and of the returns."""
    lams = np.full((2, len(action_mask)), lam, np.float64)
    if length_alpha is not None:
        if not length_alpha > 0:
            raise ValueError(f"length_alpha {length_alpha}: it must be above 0")
        actions = np.maximum(row_sums(from_arrow(action_mask, "action_mask")), 1)
        lams[:] = np.maximum(0.0, 1.0 - 1.0 / (length_alpha * actions))
    if lam_critic is not None:
        _check_fraction("lam_critic", lam_critic)
        lams[1] = lam_critic
    return lams


def _bootstrap(bootstrap_values: np.ndarray | None, rows: int) -> np.ndarray:
    if bootstrap_values is None:
        return np.zeros(rows)
    after = np.array(bootstrap_values, np.float64)
    if after.shape != (rows,):
        raise ValueError(f"bootstrap_values: shape {after.shape} for {rows} rows; they need one per row")
    if not np.isfinite(after).all():
        row = int(np.flatnonzero(~np.isfinite(after))[0])
        raise ValueError(f"bootstrap_values: {after[row]} in row {row}; use 0 where there is nothing to bootstrap from")
    return after
