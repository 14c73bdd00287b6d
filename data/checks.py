"""What the invariants of all tables share: finding the trajectory at fault, and the checks of its identity."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from data.arrow import pc
from data.ids import PATTERN, lineage
from ops.ragged import Ragged, from_arrow


class SchemaError(ValueError):
    """A table breaks a rule; the message names the trajectory, the rule and the fix."""


@dataclass(frozen=True)
class Rows:
    """A conformed table under check."""

    kind: str
    table: pa.Table
    rollouts: pa.Table | None
    policy_version: int | None

    def refuse(self, bad: np.ndarray, explain: Callable[[int], str]) -> None:
        """Raise SchemaError for the first of the bad rows, [rows] bool; `explain(row)` says value, rule and fix."""
        if bad.any():
            row = int(np.argmax(bad))
            more = f" ({int(bad.sum())} rows in all)" if bad.sum() > 1 else ""
            raise SchemaError(f"{self.kind}: trajectory {self.table.column(0)[row]}: {explain(row)}{more}")

    def refuse_tokens(self, bad: np.ndarray, over: Ragged, explain: Callable[[int, int], str]) -> None:
        """The same for [tokens] bool over the rows of a Ragged; `explain(row, position)`."""
        if bad.any():
            rows = np.searchsorted(over.offsets, np.flatnonzero(bad), "right") - 1
            first = int(np.argmax(bad)) - int(over.offsets[rows[0]])
            self.refuse(np.bincount(rows, minlength=len(over)) > 0, lambda row: explain(row, first))

    def text(self, name: str) -> np.ndarray:
        """[rows] object: str or None"""
        return self.table.column(name).cast(pa.string()).to_numpy()

    def missing(self, name: str) -> np.ndarray:
        """[rows] bool"""
        return self.table.column(name).is_null().to_numpy()

    def numbers(self, name: str) -> np.ndarray:
        """[rows] float64, NaN for null too: ask `missing` which."""
        return self.table.column(name).cast(pa.float64()).to_numpy()

    def tokens(self, name: str) -> Ragged | None:
        """A token column, None if the table has none.

        Refused: a list for some rows only, and a null token.
        """
        column, missing = self.table.column(name), self.missing(name)
        if missing.all() and len(missing):
            return None
        self.refuse(missing, lambda _: f"{name} is null, but others have it; give every row a list, or none")
        inner = pc.list_flatten(column).is_null().to_numpy()
        if inner.any():
            lengths = pc.list_value_length(column).to_numpy()
            over = Ragged(inner, np.concatenate([[0], np.cumsum(lengths)]))
            self.refuse_tokens(inner, over, lambda _, at: f"{name}[{at}] is null; every token needs a value, 0 if none")
        return from_arrow(column, name)

    def require_equal_lengths(self, columns: dict[str, Ragged | None]) -> None:
        """All token columns, where there, and the stream if known, have one length per row."""
        there = {name: column.lengths for name, column in columns.items() if column is not None}
        if self.stream is not None:
            there = {"rollouts.token_ids": self.stream.lengths, **there}
        reference = next(iter(there), "")
        for name, lengths in there.items():
            self.refuse(
                lengths != there[reference],
                lambda row, name=name, lengths=lengths: (
                    f"{lengths[row]} {name} for {there[reference][row]} {reference}; every token column has the full "
                    "stream's length: fill with 0 or false where there is nothing"
                ),
            )

    def require_finite(self, name: str, column: Ragged) -> None:
        self.refuse_tokens(
            ~np.isfinite(column.values),
            column,
            lambda row, at: f"{name}[{at}] is {column.row(row)[at]}; it must be finite: look at what computed it",
        )

    def require_zero_outside(self, name: str, column: Ragged, mask: Ragged, what: str) -> None:
        """0 (or false) where the mask, of the same rows, is false."""
        self.refuse_tokens(
            (column.values != 0) & ~mask.values,
            column,
            lambda row, at: f"{name}[{at}] is {column.row(row)[at]} {what}; it must be 0 there",
        )

    def require_one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        """A text column with only allowed values; null passes where the schema lets it."""
        text = self.table.column(name).cast(pa.string())
        known = pc.is_in(text, value_set=pa.array([*allowed, None], pa.string())).to_numpy()
        self.refuse(~known, lambda row: f"{name} is {text[row].as_py()!r}; it must be one of {', '.join(allowed)}")

    @cached_property
    def stream(self) -> Ragged | None:
        """token_ids of the rollouts, in this table's row order; None if the rollouts were not given."""
        return None if self.rollouts is None else self._from_rollouts("token_ids")

    @cached_property
    def action_mask(self) -> Ragged | None:
        return None if self.rollouts is None else self._from_rollouts("action_mask")

    def check_identity(self) -> None:
        """No null where the schema has none; ids well-formed and unique; the rows of a root side by side."""
        for field in self.table.schema:
            if not field.nullable:
                self.refuse(self.missing(field.name), lambda _, n=field.name: f"{n} is null; it is required: fill it")
        ids = self.table.column("trajectory_id")
        formed = pc.match_substring_regex(ids, PATTERN).to_numpy()
        self.refuse(~formed, lambda _: "the id must be a root without '/', then '/' and a number per fork: R/0, R/0/2")
        self.refuse(_repeats(ids), lambda _: "the id occurs twice; ids are unique: number the branches of each root")
        self.refuse(
            _returns(lineage(ids).root),
            lambda _: "its root has rows before, apart from it; groups are stored whole: sort the rows by root",
        )

    def _from_rollouts(self, name: str) -> Ragged:
        assert self.rollouts is not None
        ids = self.rollouts.column("trajectory_id").combine_chunks()
        where = pc.index_in(self.table.column("trajectory_id"), value_set=ids)
        self.refuse(where.is_null().to_numpy(), lambda _: "not in the rollouts; every row belongs to one: drop it")
        rows, column = where.to_numpy(), from_arrow(self.rollouts.column(name), name)
        return column if np.array_equal(rows, np.arange(len(column))) else column.take(rows)


def _repeats(ids: pa.ChunkedArray) -> np.ndarray:
    """[rows] bool: a value that an earlier row has."""
    codes = ids.combine_chunks().dictionary_encode().indices.to_numpy()
    return _seen_before(codes)


def _returns(roots: pa.Array) -> np.ndarray:
    """[rows] bool: the start of a run of equal values whose value had a run before."""
    codes = roots.dictionary_encode().indices.to_numpy()
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    again = np.zeros(len(codes), bool)
    again[starts] = _seen_before(codes[starts])
    return again


def _seen_before(codes: np.ndarray) -> np.ndarray:
    again = np.ones(len(codes), bool)
    again[np.unique(codes, return_index=True)[1]] = False
    return again
