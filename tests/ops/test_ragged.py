"""Packed rows: the Arrow traps of schema.md."""

import numpy as np
import pyarrow as pa
import pytest

from ops.ragged import Ragged, flatten, from_arrow, from_rows, offsets_of, row_sums, to_arrow


def test_sliced_column_starts_at_its_own_offset():
    column = pa.array([[1, 2], [3], [], [4, 5, 6]]).slice(1, 2)
    got = from_arrow(column, "x")
    assert (got.values.tolist(), got.offsets.tolist()) == ([3], [0, 1, 1])


def test_sliced_bools_keep_their_bits():
    # The slice begins at bit 3.
    got = from_arrow(pa.array([[True] * 3, [False, True], [True]]).slice(1), "x")
    assert got.values.tolist() == [False, True, True]


def test_chunked_column_of_slices():
    chunk = pa.array([[1], [2, 3], [4]])
    tokens, offsets = flatten(pa.chunked_array([chunk.slice(1), chunk.slice(0, 1), chunk.slice(0, 0)]), "x")
    assert (tokens.to_pylist(), offsets.tolist()) == ([2, 3, 4, 1], [0, 2, 3, 4])


def test_one_chunk_of_numbers_is_not_copied():
    values = np.arange(4, dtype=np.float32)
    column = pa.ListArray.from_arrays(pa.array([0, 1, 4], pa.int32()), pa.array(values))
    assert np.shares_memory(from_arrow(column.slice(1), "x").values, values)


def test_nan_survives_the_round_trip():
    back = from_arrow(to_arrow(from_rows([[1, np.nan], []], np.float32), pa.float32()), "x")
    assert np.array_equal(back.values, [1, np.nan], equal_nan=True)
    assert back.offsets.tolist() == [0, 2, 2]


def test_row_sums():
    # rows (1 2) () (4) ()
    offsets = offsets_of(np.array([2, 0, 1, 0]))
    assert row_sums(Ragged(np.array([1.0, 2.0, 4.0]), offsets)).tolist() == [3, 0, 4, 0]
    assert row_sums(Ragged(np.array([True, False, True]), offsets)).tolist() == [1, 0, 1, 0]
    assert row_sums(Ragged(np.zeros(0, np.float32), offsets_of(np.zeros(2, np.int64)))).tolist() == [0, 0]


def test_row_sums_of_one_row_do_not_touch_another():
    assert row_sums(from_rows([[np.nan], [0.1]], np.float64)).tolist()[1] == 0.1


def test_take_reorders_rows():
    taken = from_rows([[1], [2, 3], []], np.int32).take(np.array([1, 2, 1]))
    assert (taken.values.tolist(), taken.offsets.tolist()) == ([2, 3, 2, 3], [0, 2, 2, 4])


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([1, 2]), "x: int64; it must be a list column"),
        (pa.array([["a"]]), "x: list.*numbers or bools"),
        (pa.array([[1], None]), "x: 1 null rows"),
        (pa.array([[1, None, None]]), "x: 2 null tokens"),
        (pa.ListArray.from_arrays(pa.array([0, 2, 1], pa.int32()), pa.array([1, 2])), "x: list offsets decrease"),
    ],
)
def test_errors_name_the_column(column, says):
    with pytest.raises(ValueError, match=says):
        from_arrow(column, "x")
