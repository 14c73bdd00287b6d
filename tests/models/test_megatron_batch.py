"""Packing rows into micro-batches, and finding similar lengths."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.megatron.batch import Bucket, bucket_rows, flat_indices, pack
from ops.ragged import from_rows

CPU = torch.device("cpu")


def test_flat_indices() -> None:
    # Rows of lengths 2, 1, 3 lie at 0-1, 2, 3-5; rows 2 and 0 in that order are 3 4 5 0 1.
    assert flat_indices(np.array([0, 2, 3, 6]), np.array([2, 0])).tolist() == [3, 4, 5, 0, 1]


def test_packed_tokens_and_positions() -> None:
    packed = pack(from_rows([[5, 6], [7], [8, 9, 4]], np.int32), np.array([2, 0]), CPU)
    assert packed.tokens.tolist() == [[8, 9, 4, 5, 6]]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1]
    # One bucket of width 3: 8 9 4 | 5 6 (6 again, as padding).
    assert packed.padded.buckets == [Bucket(0, 2, 3)]
    assert packed.padded.slots.tolist() == [0, 1, 2, 3, 4, 4]
    assert packed.padded.place.tolist() == [0, 1, 2, 3, 4]


def test_rows_of_one_length_need_no_padding() -> None:
    packed = pack(from_rows([[1, 2], [3, 4]], np.int32), np.array([0, 1]), CPU)
    assert packed.padded.slots is None and packed.padded.place is None


def test_a_long_outlier_stands_alone() -> None:
    groups = bucket_rows(np.array([30, 24, 1000, 28]))
    assert [group.tolist() for group in groups] == [[2], [0, 1, 3]]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60))
def test_buckets_hold_every_row_once_with_bounded_padding(lengths: list[int]) -> None:
    groups = bucket_rows(np.array(lengths))
    assert sorted(int(row) for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[row] for row in group)
        assert all(longest - lengths[row] <= max(16, longest // 4) for row in group)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_every_token_comes_back_from_its_slot(lengths: list[int]) -> None:
    total = sum(lengths)
    streams = from_rows(np.split(np.arange(total), np.cumsum(lengths)[:-1]), np.int32)
    padded = pack(streams, np.arange(len(lengths)), CPU).padded
    if padded.slots is not None:
        assert padded.slots[padded.place].tolist() == list(range(total))
    assert sum(b.rows * b.width for b in padded.buckets) == (total if padded.slots is None else len(padded.slots))
