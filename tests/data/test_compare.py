"""Comparing tables: what differs is found where it was put, and nothing else is; agrees with the content digest."""

import math
import struct

import numpy as np
import pyarrow as pa
import pytest

from data.columns import VOLATILE
from data.compare import ColumnDifference, compare_tables
from data.digest import table_digest

NAN = float("nan")
OTHER_NAN = struct.unpack("<f", struct.pack("<I", 0x7FC00001))[0]
IDS = ["A/0", "A/1", "B/0", "B/1"]
PARTS = pa.map_(pa.string(), pa.float32())


def table(**columns: pa.Array | list[object]) -> pa.Table:
    return pa.table({"trajectory_id": IDS, **columns})


def floats(*rows: list[float] | None) -> pa.Array:
    return pa.array(rows, pa.list_(pa.float32()))


def only(recorded: pa.Table, again: pa.Table) -> ColumnDifference:
    """The one column that differs; the digests differ too."""
    (found,) = compare_tables(recorded, again).columns
    assert table_digest(recorded) != table_digest(again)
    return found


def test_a_table_equals_itself_in_every_layout(rollouts: pa.Table) -> None:
    assert not compare_tables(rollouts, rollouts)
    chunked = pa.concat_tables([rollouts.slice(0, 1), rollouts.slice(1)])
    assert not compare_tables(rollouts, chunked)
    place = rollouts.column_names.index("stage")
    plain = rollouts.set_column(place, "stage", rollouts.column("stage").cast(pa.string()).dictionary_encode())
    assert not compare_tables(rollouts, plain)
    assert not compare_tables(rollouts.slice(0, 0), rollouts.slice(0, 0))


def test_lists_of_floats_give_rows_first_row_and_largest_difference() -> None:
    """Rows 1 and 3 differ, by .5 and by .25 and 2; row 2 is empty in both."""
    recorded = table(values=floats([1, 2], [3], [], [4, 5]))
    again = table(values=floats([1, 2], [3.5], [], [4.25, 7]))
    assert only(recorded, again) == ColumnDifference("values", 2, "A/1", 2.0)


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ([1], [1, 2], "A/0"),  # longer
        ([1, 2], [2], "A/0"),
        (None, [1], "A/0"),
        ([1], None, "A/0"),
        ([], None, "A/0"),
        ([NAN], [1], "A/0"),
        ([math.inf], [1], "A/0"),
    ],
)
def test_what_no_number_measures_is_infinite(before: list[float] | None, after: list[float] | None, first: str) -> None:
    recorded, again = (table(values=floats(row, [1], None, [])) for row in (before, after))
    assert only(recorded, again) == ColumnDifference("values", 1, first, math.inf)


def test_nan_equals_nan_and_zero_differs_from_minus_zero() -> None:
    reward = pa.array([NAN, 0.0, math.inf, None], pa.float32())
    assert not compare_tables(
        table(reward=reward), table(reward=pa.array([OTHER_NAN, 0, math.inf, None], pa.float32()))
    )
    negative = pa.array([NAN, -0.0, math.inf, None], pa.float32())
    assert only(table(reward=reward), table(reward=negative)) == ColumnDifference("reward", 1, "A/1", 0.0)


def test_text_integers_bools_and_structs_have_no_largest() -> None:
    recorded = table(a=["x", "y", None, "z"], b=[1, 2, 3, 4], c=[True] * 4, d=[{"t": "x", "r": 1.0}] * 4)
    again = table(a=["x", "Y", "", "z"], b=[1, 2, 3, 5], c=[False] * 4, d=[{"t": "x", "r": 1.0}] * 3 + [None])
    assert compare_tables(recorded, again).columns == (
        ColumnDifference("a", 2, "A/1", None),
        ColumnDifference("b", 1, "B/1", None),
        ColumnDifference("c", 4, "A/0", None),
        ColumnDifference("d", 1, "B/1", None),
    )


def test_nested_structs_in_lists(rollouts: pa.Table, rollout_rows: list[dict[str, object]]) -> None:
    """One turn of the third trajectory says something else."""
    turns = rollouts.column("turns").to_pylist()
    turns[2][1]["text"] = "other"
    place = rollouts.column_names.index("turns")
    again = rollouts.set_column(
        place, rollouts.schema.field("turns"), pa.array(turns, rollouts.schema.field("turns").type)
    )
    assert only(rollouts, again) == ColumnDifference("turns", 1, "B/0", None)


def test_maps_do_not_depend_on_the_order_of_their_entries() -> None:
    """Then .5 becomes .75, and a key is renamed."""
    parts = [[("a", 1.0), ("b", 0.5)], [], None, [("c", 2.0)]]
    recorded = table(parts=pa.array(parts, PARTS))
    turned = table(parts=pa.array([[("b", 0.5), ("a", 1.0)], *parts[1:]], PARTS))
    assert not compare_tables(recorded, turned)
    assert table_digest(recorded) == table_digest(turned)
    changed = table(parts=pa.array([[("b", 0.75), ("a", 1.0)], *parts[1:]], PARTS))
    assert only(recorded, changed) == ColumnDifference("parts", 1, "A/0", 0.25)
    renamed = table(parts=pa.array([*parts[:3], [("d", 2.0)]], PARTS))
    assert only(recorded, renamed) == ColumnDifference("parts", 1, "B/1", math.inf)


def test_rows_are_matched_by_trajectory() -> None:
    """The second has C/0 for A/1, and its rows the other way round: only B/0's value differs."""
    recorded = table(x=[1.0, 2.0, 3.0, 4.0])
    again = pa.table({"trajectory_id": ["B/1", "B/0", "C/0", "A/0"], "x": [4.0, 3.5, 9.0, 1.0]})
    found = compare_tables(recorded, again)
    assert (found.only_recorded, found.only_again, found.rows, found.reordered) == (("A/1",), ("C/0",), 3, True)
    assert found.columns == (ColumnDifference("x", 1, "B/0", 0.5),)


def test_order_alone_is_a_difference_as_the_digest_has_it() -> None:
    recorded = table(x=[1, 2, 3, 4])
    again = recorded.take([3, 2, 1, 0])
    found = compare_tables(recorded, again)
    assert found and found.reordered and not found.columns
    assert table_digest(recorded) != table_digest(again)


def test_columns_of_one_side_or_of_two_types_are_named() -> None:
    found = compare_tables(table(x=[1] * 4, y=[1] * 4), table(y=[1.0] * 4, z=[1] * 4))
    assert found.unlike == ("x", "y", "z") and not found.columns


def test_volatile_columns_are_left_out(rollouts: pa.Table) -> None:
    place = rollouts.column_names.index("latency_ms")
    again = rollouts.set_column(place, rollouts.schema.field("latency_ms"), pa.array([9.0] * 4, pa.float32()))
    assert compare_tables(rollouts, again, VOLATILE["rollouts"]).columns == ()
    assert [c.column for c in compare_tables(rollouts, again).columns] == ["latency_ms"]


def test_more_rows_than_are_compared_at_once() -> None:
    """The last of 70,000."""
    ids, x = [f"R{i}" for i in range(70_000)], np.arange(70_000.0)
    recorded = pa.table({"trajectory_id": ids, "x": x})
    x = x.copy()
    x[-1] += 0.125
    (found,) = compare_tables(recorded, pa.table({"trajectory_id": ids, "x": x})).columns
    assert found == ColumnDifference("x", 1, "R69999", 0.125)


def test_infinity_is_text_in_json() -> None:
    assert ColumnDifference("x", 1, "R", math.inf).as_json()["largest"] == "inf"
    assert ColumnDifference("x", 1, "R", 0.5).as_json()["largest"] == 0.5


def test_a_table_without_ids_is_refused() -> None:
    with pytest.raises(ValueError, match=r"columns \['x'\].*trajectory_id"):
        compare_tables(pa.table({"x": [1]}), table())
