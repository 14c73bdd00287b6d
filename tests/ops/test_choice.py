"""A share of the groups, by hand."""

import math

import numpy as np
import pytest

from ops.choice import chosen_rows

NAN = math.nan


def test_whole_groups_with_the_best_and_the_worst() -> None:
    """5 groups of two, 2 to be had: group 3 has the best reward, group 1 the worst."""
    groups = np.repeat(np.arange(5), 2)
    rewards = np.array([0.5, 0.5, 0.0, 0.5, NAN, NAN, 0.5, 1.0, 0.5, 0.5])
    assert np.unique(groups[chosen_rows(groups, rewards, 0.4)]).tolist() == [1, 3]
    assert chosen_rows(groups, rewards, 0.4).sum() == 4


def test_best_and_worst_come_even_beyond_the_share() -> None:
    assert chosen_rows(np.arange(100), np.arange(100.0), 0.01).nonzero()[0].tolist() == [0, 99]


def test_the_others_are_spread() -> None:
    """10 groups, 4 of them: 0 and 9, and of 1 to 8 the middle of each half, the 3rd and the 7th."""
    assert chosen_rows(np.arange(10), np.arange(10.0), 0.4).nonzero()[0].tolist() == [0, 3, 7, 9]


def test_all_none_and_no_reward() -> None:
    groups = np.arange(4)
    assert chosen_rows(groups, np.full(4, NAN), 1.0).tolist() == [True] * 4
    assert chosen_rows(groups, np.arange(4.0), 0.0).tolist() == [False] * 4
    assert chosen_rows(groups, np.full(4, NAN), 0.5).nonzero()[0].tolist() == [1, 3]
    assert chosen_rows(np.array([], int), np.array([]), 0.5).tolist() == []


def test_rounding_takes_no_group_more() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point."""
    assert chosen_rows(np.arange(100), np.zeros(100), 0.07).sum() == 7


@pytest.mark.parametrize("share", [-0.1, 1.1, NAN])
def test_share_outside_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"it must lie in \[0, 1\]"):
        chosen_rows(np.arange(2), np.zeros(2), share)
