"""The tokens of some trajectories with their numbers, for people: a counted sample, and of long ones their ends."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from data.trajectories import Trajectories

Json = dict[str, Any]
ENDS = 5  # of the worst and of the best, always among the sample
FAILED = 20  # likewise
NUMBERS = ("rollout_logprobs", "values", "token_advantages")
PROMPT, IN_LOSS, OUT_OF_LOSS = "·", "1", "0"


def choose(found: Trajectories, room: int, limit: int) -> list[int]:
    """Rows whose tokens are shown: the worst, the best and some that failed; their groups; then other groups.

    Groups are taken whole, evenly over the iteration, as long as there is room: `room` tokens, of which one
    trajectory counts `limit` at most.
    """
    members: dict[str, list[int]] = {}
    for row, root in enumerate(found.roots):
        members.setdefault(root, []).append(row)
    sample = _Sample(np.minimum(found.token_ids.lengths, limit), room)
    first = [*found.worst(ENDS), *found.best(ENDS), *found.failed()[:FAILED]]
    for row in first:
        sample.take([row])
    for row in first:
        sample.take(members[found.roots[row]])
    for root in _spread(list(members)):
        sample.take(members[root])
    return sorted(sample.chosen)


class _Sample:
    def __init__(self, costs: np.ndarray, room: int) -> None:
        self.chosen: set[int] = set()
        self._costs, self._room = costs, room

    def take(self, rows: Iterable[int]) -> None:
        """All of them, or none if there is not enough room."""
        fresh = [row for row in rows if row not in self.chosen]
        cost = int(self._costs[fresh].sum())
        if cost <= self._room:
            self.chosen.update(fresh)
            self._room -= cost


def _spread(names: Sequence[str]) -> list[str]:
    """All of them, in an order of which every beginning is spread evenly over the list."""
    golden = (np.arange(len(names)) * 0.6180339887498949) % 1.0
    return [names[i] for i in np.argsort(np.argsort(golden, kind="stable"), kind="stable")]


def strips_of(found: Trajectories, rows: Sequence[int], limit: int, with_gap: bool) -> dict[int, Json]:
    """By row: token ids, a sign for each (PROMPT, IN_LOSS, OUT_OF_LOSS), and numbers of the sampled ones in order.

    Of a long one beginning and end, with `cut`: after how many tokens how many are left out.
    """
    ids, acted, loss = found.token_ids, found.action_mask, found.tokens("loss_mask")
    numbers = {name: column for name in NUMBERS if (column := found.tokens(name)) is not None}
    old = found.tokens("old_logprobs") if with_gap else None
    strips: dict[int, Json] = {}
    for row in rows:
        length = len(ids.row(row))
        shown = _shown(length, limit)
        mask = acted.row(row)[shown]
        at = shown[mask]
        strip: Json = {"ids": ids.row(row)[shown].tolist()}
        strip["mask"] = _signs(mask, acted.row(row)[shown] if loss is None else loss.row(row)[shown])
        strip |= {name: rounded(column.row(row)[at]) for name, column in numbers.items()}
        if old is not None:
            strip["gap"] = _significant(old.row(row)[at].astype(np.float64) - numbers["rollout_logprobs"].row(row)[at])
        if len(shown) < length:
            strip["cut"] = [int(np.argmax(shown != np.arange(len(shown)))), length - len(shown)]
        strips[row] = strip
    return strips


def _shown(length: int, limit: int) -> np.ndarray:
    """Positions: all, or three quarters of the limit from the beginning and the rest from the end."""
    if length <= limit:
        return np.arange(length)
    head = 3 * limit // 4
    return np.concatenate([np.arange(head), np.arange(length - (limit - head), length)])


def _signs(acted: np.ndarray, loss: np.ndarray) -> str:
    return "".join(np.where(acted, np.where(loss, IN_LOSS, OUT_OF_LOSS), PROMPT).tolist())


def rounded(values: np.ndarray, digits: int = 4) -> list[float | None]:
    """JSON has no NaN: what is not finite is null."""
    finite = np.isfinite(values)
    numbers = np.round(values.astype(np.float64), digits).tolist()
    return [x if ok else None for x, ok in zip(numbers, finite, strict=True)]


def _significant(values: np.ndarray) -> list[float | None]:
    """To three figures."""
    return [float(f"{x:.3g}") if np.isfinite(x) else None for x in values.tolist()]
