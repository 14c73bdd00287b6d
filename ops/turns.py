"""The turns of a trajectory: runs of sampled tokens, each of which may be one step of its own."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ops.ragged import Ragged

STEP_UNITS = ("token", "turn")


@dataclass(frozen=True)
class Turns:
    """What the policy said without an interruption, be it that another of its versions went on. Of all rows."""

    mask: Ragged  # bool, the tokens that the policy sampled

    @cached_property
    def starts(self) -> np.ndarray:
        """[turns] int64: flat index of each one's first token."""
        sampled_before = np.append(False, self.mask.values)[:-1]
        sampled_before[self.mask.offsets[:-1][self.mask.lengths > 0]] = False
        return np.flatnonzero(self.mask.values & ~sampled_before)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[turns] int64: tokens."""
        sampled = np.flatnonzero(self.mask.values)
        return np.diff(np.searchsorted(sampled, self.starts), append=len(sampled))

    @cached_property
    def offsets(self) -> np.ndarray:
        """[rows + 1] int64, into turns."""
        return np.searchsorted(self.starts, self.mask.offsets)

    def sums(self, tokens: np.ndarray) -> Ragged:
        """[tokens] float -> float64, the sum over each turn; what stands at other tokens is never read."""
        kept = np.where(self.mask.values, tokens, 0.0).astype(np.float64)
        return Ragged(np.add.reduceat(kept, self.starts) if len(self.starts) else np.zeros(0), self.offsets)

    def firsts(self, tokens: np.ndarray) -> Ragged:
        """[tokens] -> the entry at each turn's first token."""
        return Ragged(tokens[self.starts], self.offsets)

    def spread(self, numbers: np.ndarray) -> Ragged:
        """[turns] one number a turn -> over the stream, that number at each of its tokens, 0 at other tokens."""
        tokens = np.zeros(len(self.mask.values), numbers.dtype)
        tokens[self.mask.values] = np.repeat(numbers, self.lengths)
        return self.mask.like(tokens)

    def at_firsts(self, numbers: np.ndarray) -> Ragged:
        """[turns] one number a turn -> over the stream, that number at its first token, 0 elsewhere."""
        tokens = np.zeros(len(self.mask.values), numbers.dtype)
        tokens[self.starts] = numbers
        return self.mask.like(tokens)


def value_mask(action_mask: Ragged, step_unit: str) -> Ragged:
    """bool, the tokens whose value the critic learns: those at which a step begins. Source: math.md 3.

    Raises ValueError for an unknown unit.
    """
    if step_unit not in STEP_UNITS:
        raise ValueError(f"step_unit {step_unit!r}: it must be one of {', '.join(STEP_UNITS)}")
    if step_unit == "token":
        return action_mask
    turns = Turns(action_mask)
    return turns.at_firsts(np.ones(len(turns.starts), bool))
