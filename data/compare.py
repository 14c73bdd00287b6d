"""How two tables of one kind differ: by column, rows matched by trajectory. No difference means equal content digests.

As in `data.digest`, NaN equals NaN, 0.0 and -0.0 differ, and the order of a map's entries does not count.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data.arrow import pc

ROWS_AT_ONCE = 2**16
ID = "trajectory_id"
NOWHERE = (np.empty(0, np.int64), np.empty(0))
# Rows that differ, [n] int64 ascending, and by how much, [n] float64: infinite unless by two finite floats.
type Gaps = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ColumnDifference:
    """One column whose values differ."""

    column: str
    rows: int  # in which it differs
    first: str  # trajectory_id of the first of them
    largest: float | None  # absolute difference; infinite where one is null, not finite or of another length

    def as_json(self) -> dict[str, str | int | float | None]:
        """JSON has no infinity: it is a string there."""
        largest = str(self.largest) if self.largest == math.inf else self.largest
        return {"column": self.column, "rows": self.rows, "first": self.first, "largest": largest}


@dataclass(frozen=True)
class TableDifference:
    """How the second table differs from the first; false if it does not."""

    rows: int  # in both
    columns: tuple[ColumnDifference, ...]
    unlike: tuple[str, ...]  # columns that one lacks, or that have two types
    only_recorded: tuple[str, ...]  # trajectories
    only_again: tuple[str, ...]
    reordered: bool  # the rows in both come in another order

    def __bool__(self) -> bool:
        return bool(self.columns or self.unlike or self.only_recorded or self.only_again or self.reordered)


def compare_tables(recorded: pa.Table, again: pa.Table, volatile: Collection[str] = ()) -> TableDifference:
    """Compare by trajectory_id, without the volatile columns.

    `largest` is given for columns that hold floats alone, also in lists and maps; it bounds every difference there.
    Raises ValueError for a table without trajectory_id.
    """
    for table in (recorded, again):
        if ID not in table.column_names:
            raise ValueError(f"a table with columns {table.column_names}: rows are compared by {ID!r}, which it lacks")
    recorded, again = recorded.unify_dictionaries(), again.unify_dictionaries()
    ids, others = recorded.column(ID), again.column(ID)
    only_recorded, only_again = _lacking(ids, others), _lacking(others, ids)
    if only_recorded:
        recorded = recorded.filter(pc.is_in(ids, value_set=others.combine_chunks()))
    if only_again:
        again = again.filter(pc.is_in(others, value_set=ids.combine_chunks()))
    reordered = not recorded.column(ID).equals(again.column(ID))
    if reordered:
        again = again.take(pc.index_in(recorded.column(ID), value_set=again.column(ID).combine_chunks()))
    names = [n for n in dict.fromkeys(recorded.column_names + again.column_names) if n not in volatile]
    unlike = tuple(name for name in names if _type_of(recorded, name) != _type_of(again, name))
    found = (_compare_column(recorded, again, name) for name in names if name not in unlike)
    columns = tuple(difference for difference in found if difference is not None)
    return TableDifference(recorded.num_rows, columns, unlike, only_recorded, only_again, reordered)


def _lacking(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> tuple[str, ...]:
    """Ids that the others do not have, in order."""
    there = pc.is_in(ids, value_set=others.combine_chunks())
    return tuple(ids.filter(pc.invert(there)).to_pylist())


def _type_of(table: pa.Table, name: str) -> pa.DataType | None:
    return table.schema.field(name).type if name in table.column_names else None


def _compare_column(recorded: pa.Table, again: pa.Table, name: str) -> ColumnDifference | None:
    first, second = recorded.column(name), again.column(name)
    parts = []
    for start in range(0, recorded.num_rows, ROWS_AT_ONCE):
        rows, gap = _gaps(*(column.slice(start, ROWS_AT_ONCE).combine_chunks() for column in (first, second)))
        parts.append((rows + start, gap))
    rows, gap = (np.concatenate(part) for part in zip(*parts, strict=True)) if parts else NOWHERE
    if not rows.size:
        return None
    largest = float(gap.max()) if _only_floats(first.type) else None
    return ColumnDifference(name, int(rows.size), recorded.column(ID)[int(rows[0])].as_py(), largest)


def _only_floats(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return _only_floats(kind.item_type)
    return _only_floats(kind.value_type) if pa.types.is_list(kind) else pa.types.is_floating(kind)


def _gaps(a: pa.Array, b: pa.Array) -> Gaps:
    if pa.types.is_dictionary(a.type):
        a, b = a.dictionary_decode(), b.dictionary_decode()
    if not a.null_count and not b.null_count:
        return _gaps_of_valid(a, b)
    lacking, lacking_too = (_numpy(x.is_null()) for x in (a, b))
    both = np.flatnonzero(~(lacking | lacking_too))
    rows, gap = _gaps_of_valid(a.take(pa.array(both)), b.take(pa.array(both)))
    return _merged([_infinite(lacking != lacking_too), (both[rows], gap)])


def _gaps_of_valid(a: pa.Array, b: pa.Array) -> Gaps:
    kind = a.type
    if pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _gaps_of_lists(a, b)
    if pa.types.is_struct(kind):
        return _merged([_gaps(x, y) for x, y in zip(a.flatten(), b.flatten(), strict=True)])
    if pa.types.is_floating(kind):
        return _gaps_of_floats(_numpy(a), _numpy(b))
    return NOWHERE if a.equals(b) else _infinite(_numpy(pc.not_equal(a, b)))


def _gaps_of_lists(a: pa.Array, b: pa.Array) -> Gaps:
    if pa.types.is_map(a.type):
        a, b = _sorted_pairs(a), _sorted_pairs(b)
    lengths, others = (_numpy(pc.list_value_length(x)) for x in (a, b))
    alike = np.flatnonzero(lengths == others)
    if len(alike) < len(lengths):
        a, b = a.take(pa.array(alike)), b.take(pa.array(alike))
    items, gap = _gaps(a.flatten(), b.flatten())
    owners = alike[np.searchsorted(np.cumsum(lengths[alike]), items, "right")]
    return _merged([_infinite(lengths != others), (owners, gap)])


def _sorted_pairs(maps: pa.Array) -> pa.Array:
    """[rows] lists of pairs, each by key."""
    kind = pa.list_(pa.struct([("key", maps.type.key_type), ("value", maps.type.item_type)]))
    lists = maps.cast(kind)
    lengths, pairs = pc.list_value_length(lists), lists.flatten()
    keys = pa.table({"row": np.repeat(np.arange(len(lists)), _numpy(lengths)), "key": pairs.flatten()[0]})
    offsets = np.concatenate([[0], np.cumsum(_numpy(lengths))]).astype(np.int32)
    ordered = pairs.take(pc.sort_indices(keys, [("row", "ascending"), ("key", "ascending")]))
    return pa.ListArray.from_arrays(pa.array(offsets), ordered)


def _gaps_of_floats(a: np.ndarray, b: np.ndarray) -> Gaps:
    bits = a.dtype.str.replace("f", "u")
    rows = np.flatnonzero(a.view(bits) != b.view(bits))
    x, y = a[rows].astype(np.float64), b[rows].astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(x - y)
    gap[np.isnan(gap)] = np.inf
    both_nan = np.isnan(x) & np.isnan(y)
    return rows[~both_nan], gap[~both_nan]


def _infinite(differs: np.ndarray) -> Gaps:
    rows = np.flatnonzero(differs)
    return rows, np.full(len(rows), np.inf)


def _merged(parts: list[Gaps]) -> Gaps:
    """Each row once, with its largest gap."""
    rows, gaps = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not rows.size:
        return NOWHERE
    once, place = np.unique(rows, return_inverse=True)
    largest = np.zeros(len(once))
    np.maximum.at(largest, place, gaps)
    return once, largest


def _numpy(array: pa.Array) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)
