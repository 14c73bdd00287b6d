"""Rewards onto tokens; expected values worked by hand."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from data.columns import TURN
from ops.ragged import from_rows
from ops.rewards import EnvironmentRewards, scatter, scored, shape_truncated


def test_scatter_golden(masks):
    # math.md 3: lengths 2, 1 and rewards 1, .5 -> 0 1 .5
    placed, unplaced = scatter(np.array([1.0, 0.5]), masks("11", "1"))
    assert (placed.to_pylist(), unplaced) == ([[0, 1], [0.5]], 0)


def test_c03_reward_moves_to_the_last_action_token(masks):
    placed, _ = scatter(np.array([1.0, 2.0]), masks("011000", "110"))
    assert placed.to_pylist() == [[0, 0, 1, 0, 0, 0], [0, 2, 0]]


def test_c04_reward_lands_on_eos_or_on_the_last_sampled_token(masks):
    # 3 prompt tokens; ended by EOS (a sampled token); cut at max length; ended, then an unsampled template token
    placed, _ = scatter(np.array([1.0, 1.0, 1.0]), masks("000111", "000111", "0001110"))
    assert placed.to_pylist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0]]


def test_trajectory_without_an_action_token_is_counted(masks):
    placed, unplaced = scatter(np.array([1.0, 2.0, 0.0, np.nan]), masks("00", "", "1", "0"))
    assert (placed.to_pylist(), unplaced) == ([[0, 0], [], [0], [0]], 2)


def test_token_rewards_are_added_where_the_policy_acted(floats, masks):
    # .5 before the first action -> the first one; .25 on the observation -> the action before it; 1 + .125 at the end
    extra = floats([0.5, 0, 0.25, 0, 0.125], [0, 2])
    placed, _ = scatter(np.array([1.0, 3.0]), masks("01001", "10"), extra)
    assert placed.to_pylist() == [[0, 0.75, 0, 0, 1.125], [5, 0]]


def test_c12_failed_trajectory_places_nothing(floats, masks):
    placed, unplaced = scatter(np.array([np.nan, np.inf, 1.0]), masks("11", "11", "1"), floats([1, 1], [1, 1], [1]))
    assert (placed.to_pylist(), unplaced) == ([[0, 0], [0, 0], [2]], 0)


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), max_size=12), min_size=1, max_size=5))
@settings(deadline=None)
def test_c03_sum_of_rewards_is_preserved(rows):
    mask = pa.array([[action for action, _ in row] for row in rows], pa.list_(pa.bool_()))
    extra = pa.array([[reward for _, reward in row] for row in rows], pa.list_(pa.float32()))
    placed, unplaced = scatter(np.arange(len(rows)) + 1.0, mask, extra)
    acted = [any(action for action, _ in row) for row in rows]
    assert unplaced == acted.count(False)
    for i, row in enumerate(rows):
        tokens = placed[i].as_py()
        assert sum(tokens) == (i + 1 + sum(reward for _, reward in row) if acted[i] else 0)
        assert not any(reward for reward, (action, _) in zip(tokens, row, strict=True) if not action)


def test_scatter_errors_name_the_argument(floats, masks):
    with pytest.raises(ValueError, match=r"rewards: shape \(1,\) for 2 rows"):
        scatter(np.array([1.0]), masks("1", "1"))
    with pytest.raises(ValueError, match="token_rewards: its rows differ"):
        scatter(np.array([1.0]), masks("11"), floats([1]))


def spans(*turns: tuple[bool, int, float | None]) -> list[dict[str, object]]:
    """(generated, tokens, reward) of each, from the stream's beginning."""
    starts = np.cumsum([0, *(length for _, length, _ in turns)]).tolist()
    names = ("is_generated", "length", "env_reward", "start")
    return [dict(zip(names, (*turn, start), strict=True)) for turn, start in zip(turns, starts, strict=False)]


TURNS = pa.array(
    [
        # .5 + nothing + .25; the observation's 9 is nobody's
        spans((False, 2, None), (True, 2, 0.5), (False, 1, 9.0), (True, 1, None), (False, 1, None), (True, 2, 0.25)),
        spans((False, 1, None), (True, 1, None)),
        spans((False, 1, None)),
        spans((False, 1, None), (True, 1, 1.0), (False, 1, None), (True, 1, float("nan"))),
        spans((False, 1, None), (True, 0, 2.0)),  # a turn without a token: in the total, but nowhere to lie
    ],
    pa.list_(TURN),
)


@pytest.mark.parametrize("cut", [0, 2])
def test_environment_rewards(cut):
    column = pa.chunked_array([TURNS.slice(0, cut), TURNS.slice(cut)])
    found = EnvironmentRewards.of(column)
    assert_allclose(found.totals, [0.75, 0, 0, np.nan, 2])
    assert found.counts.tolist() == [2, 0, 0, 2, 1]
    stream = from_rows([[0] * n for n in (9, 2, 1, 4, 1)], np.int32)
    placed = found.placed(stream, np.array([True, True, True, False, True]))
    assert placed.to_pylist() == [[0, 0, 0, 0.5, 0, 0, 0, 0, 0.25], [0, 0], [0], [0] * 4, [0]]


def test_environment_rewards_of_a_slice_and_of_nothing():
    assert EnvironmentRewards.of(TURNS.slice(4)).totals.tolist() == [2]
    assert EnvironmentRewards.of(TURNS.slice(1, 1)).counts.tolist() == [0]
    assert EnvironmentRewards.of(pa.chunked_array([], TURNS.type)).totals.tolist() == []


def test_null_reward_is_not_a_failed_one():
    column = pa.array([1, float("nan"), 0], pa.float32())
    assert np.array_equal(scored(column), [1, np.nan, 0], equal_nan=True)
    with pytest.raises(ValueError, match="reward: 1 of 2 not scored yet"):
        scored(pa.array([1, None], pa.float32()))


# Rewards 1, -1, NaN, 1; M = 100. Lengths 100, 100, 100, 70; the last one ended by itself.
REWARDS = np.array([1.0, -1.0, np.nan, 1.0])
LENGTHS = np.array([100, 100, 100, 70])
TRUNCATED = np.array([True, True, True, False])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("keep", [1, -1, np.nan, 1]),
        ("zero", [0, 0, np.nan, 1]),
        # buffer 40: -(100 - 60) / 40 * .5 = -.5; 70 tokens: -(70 - 60) / 40 * .5 = -.125
        ("soft", [0.5, -1.5, np.nan, 0.875]),
    ],
)
def test_shape_truncated(mode, expected):
    shaped, penalty = shape_truncated(REWARDS, LENGTHS, 100, TRUNCATED, mode, buffer=40, factor=0.5)
    assert_allclose(shaped, expected)
    assert_allclose(penalty, np.where(np.isnan(expected), 0, np.array(expected) - REWARDS))


def test_soft_penalty_defaults():
    # buffer 4096, factor 1, M 8192: 0 up to 4096 tokens, -.5 at 6144, -1 at 8192
    shaped, _ = shape_truncated(np.ones(3), np.array([4096, 6144, 8192]), 8192, np.zeros(3, bool), "soft")
    assert_allclose(shaped, [1, 0.5, 0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mode": "hard"}, "mode 'hard': it must be one of keep, zero, soft"),
        ({"mode": "soft", "buffer": 0}, "buffer 0"),
        ({"mode": "keep", "lengths": np.zeros(2)}, "lengths"),
    ],
)
def test_shape_truncated_errors(change, says):
    arguments = {"rewards": REWARDS, "lengths": LENGTHS, "max_new_tokens": 100, "truncated": TRUNCATED} | change
    with pytest.raises(ValueError, match=says):
        shape_truncated(**arguments)
