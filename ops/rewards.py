"""Scalar rewards onto tokens, what an environment gave, and the reward of answers that ran out of room."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ops.ragged import Ragged, from_arrow, offsets_of, row_sums, to_arrow

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


@dataclass(frozen=True)
class EnvironmentRewards:
    """What environments gave for the turns of some trajectories."""

    flat: np.ndarray  # [turns] float64, NaN where a turn is not generated or was given none
    given: np.ndarray  # [turns] bool; a reward that is NaN is given too
    ends: np.ndarray  # [turns] int64, the index in its stream behind the turn's last token
    lengths: np.ndarray  # [turns] int64, tokens
    offsets: np.ndarray  # [rows + 1] int64, into turns

    @classmethod
    def of(cls, turns: pa.ListArray | pa.ChunkedArray) -> "EnvironmentRewards":
        """turns: list<struct<is_generated, start, length, env_reward, ...>>, as rollouts have them."""
        rows = turns.combine_chunks() if isinstance(turns, pa.ChunkedArray) else turns
        names = ("is_generated", "start", "length", "env_reward")
        generated, start, length, reward = (rows.flatten().field(name) for name in names)
        lengths = length.to_numpy().astype(np.int64)
        return cls(
            flat=reward.to_numpy(zero_copy_only=False).astype(np.float64),
            given=reward.is_valid().to_numpy(zero_copy_only=False) & generated.to_numpy(zero_copy_only=False),
            ends=start.to_numpy() + lengths,
            lengths=lengths,
            offsets=offsets_of(np.diff(rows.offsets.to_numpy())),
        )

    @property
    def totals(self) -> np.ndarray:
        """[rows] float64: the sum over each row's turns, NaN if one of them is, 0 where none was given."""
        return row_sums(Ragged(np.where(self.given, self.flat, 0.0), self.offsets))

    @property
    def counts(self) -> np.ndarray:
        """[rows] int64: turns that were given a reward."""
        return row_sums(Ragged(self.given, self.offsets))

    def placed(self, stream: Ragged, rows: np.ndarray) -> pa.ListArray:
        """Each reward at its turn's last token, of the given rows, [rows] bool; 0 elsewhere: list<float32>.

        A turn without a token has no place. stream: any column over the full streams.
        """
        tokens = np.zeros(len(stream.values), np.float32)
        spans = np.diff(self.offsets)
        here = self.given & (self.lengths > 0) & np.repeat(rows, spans)
        at = np.repeat(stream.offsets[:-1], spans) + self.ends - 1
        tokens[at[here]] = self.flat[here]
        return to_arrow(stream.like(tokens), pa.float32())


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
