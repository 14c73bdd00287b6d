"""Mini-batches and packed micro-batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.packing import mini_batches, pack


def test_first_fit_decreasing():
    # 7 5 4 3 1 into 10: 7 opens the first, 5 the second, 4 fits beside 5, 3 beside 7, 1 goes to the second
    batches = pack(np.array([1, 5, 3, 7, 4]), np.arange(5), 10)
    assert [batch.tolist() for batch in batches] == [[3, 2], [1, 4, 0]]
    # 6 5 4 1: 4 would fit beside 6 and beside 5, and goes to the first
    assert [batch.tolist() for batch in pack(np.array([6, 5, 4, 1]), np.arange(4), 10)] == [[0, 2], [1, 3]]


def test_only_the_given_rows_are_packed():
    batches = pack(np.array([9, 2, 9, 2, 2]), np.array([4, 1, 3]), 4)
    assert [batch.tolist() for batch in batches] == [[4, 1], [3]]


def test_oversize_row_goes_alone():
    # 12 of 10, then the empty row may not join it
    assert [batch.tolist() for batch in pack(np.array([0, 12, 3]), np.arange(3), 10)] == [[1], [2, 0]]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 25))
def test_pack_is_a_partition_within_the_budget(sizes, budget):
    lengths = np.array(sizes, np.int64)
    batches = pack(lengths, np.arange(len(sizes)), budget)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(sizes)))
    loads = [int(lengths[batch].sum()) for batch in batches]
    assert all(load <= budget or len(batch) == 1 for load, batch in zip(loads, batches, strict=True))
    # first fit: no two micro-batches could have been one
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])
    again = pack(lengths, np.arange(len(sizes)), budget)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 5))
def test_mini_batches_are_disjoint_and_complete(n_rows, size, seed):
    batches = mini_batches(n_rows, size, seed)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(n_rows))
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(0 < len(batch) <= size for batch in batches)


def test_mini_batches_follow_the_seed():
    first, again, other = (np.concatenate(mini_batches(100, 8, seed)).tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != list(range(100))


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="size 0"):
        mini_batches(3, 0, 0)
    with pytest.raises(ValueError, match="budget 0"):
        pack(np.array([1]), np.array([0]), 0)
