"""Which rows and tokens each rank has, worked by hand; and which layouts a model does not fit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.config import LayoutConfig
from models.megatron.batch import pack
from models.megatron.fit import require_fit
from models.megatron.shape import Experts, ModelShape, Rope
from models.megatron.shares import Shares, split_rows
from ops.ragged import from_rows

SHAPE = ModelShape("qwen3", 6, 48, 80, 12, 4, 16, 64, 256, 1e-6, True, Rope(1e4))


def test_rows_go_to_the_lightest_share_longest_first() -> None:
    # Lengths 9 5 4 3: row 7 (9) to share 0; 3 (5) to 1; 5 (4) to 1, now 9; 2 (3) to 0, the first of two with 9.
    shares = split_rows(np.array([2, 3, 5, 7]), np.array([3, 5, 4, 9]), 2)
    assert [share.tolist() for share in shares] == [[2, 7], [3, 5]]


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5))
def test_every_row_is_in_one_share_and_none_is_much_heavier(lengths: list[int], parts: int) -> None:
    shares = split_rows(np.arange(len(lengths)), np.array(lengths, np.int64), parts)
    assert sorted(int(row) for share in shares for row in share) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_zigzag_by_hand() -> None:
    """Two context ranks, rows of 5 and 4 tokens: padded to 8 and 4, in chunks of 2 and 1. Rank 0 has chunks 0 and 3."""
    shares = Shares(context=2)
    padded = shares.padded(np.array([5, 4]))
    assert padded.tolist() == [8, 4]
    assert shares.own_tokens(padded, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert shares.own_tokens(padded, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_padding_by_hand() -> None:
    assert Shares().padded(np.array([3, 4])).tolist() == [3, 4]
    # 7 tokens for 2 tensor ranks: one more, in a row of its own; without tokens, a row for each.
    assert Shares(sequence=2).padded(np.array([3, 4])).tolist() == [3, 4, 1]
    assert Shares(sequence=2).padded(np.array([], np.int64)).tolist() == [2]
    # Chunks of 4, and 2 x 3 ranks: the total must divide by 12. 3 -> 4, 5 -> 8, together 12.
    assert Shares(context=2, sequence=3).padded(np.array([3, 5])).tolist() == [4, 8]
    assert Shares(data=2).padded(np.array([], np.int64)).tolist() == [1]  # an empty share


@given(st.lists(st.integers(1, 40), max_size=8), st.integers(1, 3), st.integers(1, 3))
def test_ranks_have_equal_parts_that_make_up_the_whole(lengths: list[int], context: int, sequence: int) -> None:
    shares = Shares(context=context, sequence=sequence)
    padded = shares.padded(np.array(lengths, np.int64))
    parts = [shares.own_tokens(padded, rank) for rank in range(context)] if context > 1 else [np.arange(padded.sum())]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) % sequence == 0 and len(parts[0]) > 0
    assert sorted(np.concatenate(parts).tolist()) == list(range(int(padded.sum())))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 1))
def test_keys_of_all_ranks_come_back_from_their_slots(lengths: list[int], rank: int) -> None:
    streams = from_rows([np.arange(n) + 1 for n in lengths], np.int32)
    shares = Shares(context=2, context_rank=rank)
    packed = pack(streams, np.arange(len(lengths)), torch.device("cpu"), shares)
    split, padded = packed.split, shares.padded(np.array(lengths))
    gathered = np.concatenate([shares.own_tokens(padded, r) for r in range(2)])
    assert split.slots[split.place].tolist() == list(range(len(gathered)))
    # A query's position is its index within its row: the token after p real ones, and here token p + 1 by value.
    at = torch.from_numpy(packed.at)
    mine = split.local[at] >= 0
    assert (packed.positions[split.local[at][mine]] + 1).tolist() == packed.tokens[0][split.local[at][mine]].tolist()


def test_layouts_that_do_not_divide_the_model_name_the_valid_sizes() -> None:
    """Heads 12, groups 4, MLP 80, vocabulary 64: together they divide by 1, 2 and 4; 6 layers by 1, 2, 3 and 6."""
    for fits in (LayoutConfig(tensor=4), LayoutConfig(pipeline=3), LayoutConfig(context=5, data=7)):
        require_fit(SHAPE, fits)
    with pytest.raises(ValueError, match=r"layout.tensor = 3: .*heads 12, key.*valid sizes are 1, 2, 4$"):
        require_fit(SHAPE, LayoutConfig(tensor=3))
    mixed = replace(SHAPE, family="qwen3_moe", experts=Experts(8, 2, True))
    require_fit(mixed, LayoutConfig(tensor=2, sequence_parallel=True))
    with pytest.raises(ValueError, match=r"with experts: set layout.sequence_parallel = true"):
        require_fit(mixed, LayoutConfig(tensor=2))
    with pytest.raises(ValueError, match=r"layout.pipeline = 4: it must divide the 6 layers: 1, 2, 3, 6$"):
        require_fit(SHAPE, LayoutConfig(pipeline=4))
