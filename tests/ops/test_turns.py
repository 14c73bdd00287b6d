"""Turns as steps: hand-worked numbers, a slow definition in plain Python, and GAE on the compressed sequence."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from ops.gae import gae, turn_gae
from ops.ragged import from_rows
from ops.turns import Turns, value_mask

NAN = float("nan")


def test_turns_are_runs_of_sampled_tokens():
    """One ends at its row's end, one begins at the next row's beginning; a row of observations has none."""
    turns = Turns(from_rows([[0, 1, 1, 0, 1], [1, 1], [], [0, 0], [0, 1, 0]], bool))
    assert turns.starts.tolist() == [1, 4, 5, 10]
    assert turns.lengths.tolist() == [2, 1, 2, 1]
    assert turns.offsets.tolist() == [0, 2, 3, 3, 3, 4]
    numbers = np.arange(1.0, 13.0)
    assert turns.sums(numbers).values.tolist() == [5, 5, 13, 11]
    assert turns.firsts(numbers).values.tolist() == [2, 5, 6, 11]
    assert turns.spread(np.array([1, 2, 3, 4])).values.tolist() == [0, 1, 1, 0, 2, 3, 3, 0, 0, 0, 4, 0]
    assert turns.at_firsts(np.array([1, 2, 3, 4])).values.tolist() == [0, 1, 0, 0, 2, 3, 0, 0, 0, 0, 4, 0]


def test_no_turn_at_all():
    for rows in ([], [[]], [[0, 0], []]):
        turns = Turns(from_rows(rows, bool))
        assert len(turns.starts) == len(turns.lengths) == len(turns.sums(np.zeros(len(turns.mask.values))).values) == 0
        assert turns.offsets.tolist() == [0] * (len(rows) + 1)


def test_values_are_learned_where_a_step_begins():
    mask = from_rows([[0, 1, 1, 0, 1], [1, 1]], bool)
    assert value_mask(mask, "turn").values.tolist() == [False, True, False, False, True, True, False]
    assert value_mask(mask, "token").values.tolist() == mask.values.tolist()
    with pytest.raises(ValueError, match="step_unit 'span': it must be one of token, turn"):
        value_mask(mask, "span")


def test_golden_numbers(floats, masks):
    """Three turns of 2, 1, 2 tokens; rewards 1 + 2, 0, .5 - 1; V at their first tokens .2, .5, .8; gamma .9, lam .5.

    A_3 = -.5 - .8 = -1.3; A_2 = .9 * .8 - .5 + .45 * -1.3 = -.365; A_1 = 3 + .9 * .5 - .2 + .45 * -.365 = 3.08575.
    The prompt, the observations and what stands at a turn's later tokens are never read.
    """
    advantages, returns = turn_gae(
        floats([NAN, 1, 2, NAN, 0, NAN, 0.5, -1]),
        floats([NAN, 0.2, NAN, NAN, 0.5, NAN, 0.8, NAN]),
        masks("01101011"),
        gamma=0.9,
        lam=0.5,
    )
    assert_allclose(advantages[0].as_py(), [0, 3.08575, 3.08575, 0, -0.365, 0, -1.3, -1.3], atol=1e-6)
    assert_allclose(returns[0].as_py(), [0, 3.28575, 0, 0, 0.135, 0, -0.5, 0], atol=1e-6)


def test_one_turn_is_a_bandit(floats, masks):
    """A = R - V whatever gamma and lam are: 1 - .2, at each token. Cut, with a value of .5 after it: + .45."""
    arguments = floats([0, 0, 0, 1]), floats([0, 0.2, 0.5, 0.8]), masks("0111")
    for gamma, lam in ((1.0, 0.95), (0.9, 0.0)):
        advantages, returns = turn_gae(*arguments, gamma=gamma, lam=lam)
        assert_allclose(advantages[0].as_py(), [0, 0.8, 0.8, 0.8], atol=1e-6)
        assert_allclose(returns[0].as_py(), [0, 1, 0, 0], atol=1e-6)
    advantages, _ = turn_gae(*arguments, gamma=0.9, bootstrap_values=np.array([0.5]))
    assert_allclose(advantages[0].as_py(), [0, 1.25, 1.25, 1.25], atol=1e-6)


def test_options_count_turns(floats, masks):
    """V = 0, two turns, reward 1 at the end: length_alpha 1 gives lam .5; the returns' own lam is 1."""
    advantages, returns = turn_gae(
        floats([0, 0, 0, 1]), floats([0] * 4), masks("1101"), gamma=1, length_alpha=1, lam_critic=1
    )
    assert_allclose(advantages[0].as_py(), [0.5, 0.5, 0, 1], atol=1e-6)
    assert_allclose(returns[0].as_py(), [1, 0, 0, 1], atol=1e-6)


Row = list[tuple[float, float, bool]]
numbers = st.floats(-10, 10, width=32)
rows_of_tokens = st.lists(st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=20), min_size=1, max_size=5)
fraction = st.floats(0, 1)


def slow(row: Row, gamma: float, lam: float, after: float) -> tuple[list[float], list[float]]:
    """Walks the tokens, gathers turns, then A_t = sum of (gamma lam)^k delta_{t + k}, in float64."""
    turns: list[list[int]] = []
    for i, (_, _, sampled) in enumerate(row):
        if sampled and i and row[i - 1][2]:
            turns[-1].append(i)
        elif sampled:
            turns.append([i])
    values = [row[turn[0]][1] for turn in turns]
    deltas = [
        sum(row[i][0] for i in turn) + gamma * ahead - value
        for turn, value, ahead in zip(turns, values, [*values, after][1:], strict=True)
    ]
    advantages, returns = [0.0] * len(row), [0.0] * len(row)
    for t, turn in enumerate(turns):
        found = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        returns[turn[0]] = found + values[t]
        for i in turn:
            advantages[i] = found
    return advantages, returns


def columns(rows: list[Row]) -> list[pa.ListArray]:
    types = (pa.float32(), pa.float32(), pa.bool_())
    return [pa.array([[token[i] for token in row] for row in rows], pa.list_(t)) for i, t in enumerate(types)]


@given(rows=rows_of_tokens, gamma=fraction, lam=fraction, cut=st.integers(0, 5))
@settings(deadline=None, max_examples=80)
def test_equals_the_slow_definition(rows, gamma, lam, cut):
    """Of sliced and chunked columns too."""
    after = np.linspace(-1, 1, len(rows))
    chunked = [pa.chunked_array([column.slice(0, cut), column.slice(cut)]) for column in columns(rows)]
    for arguments, start in ((chunked, 0), ([column.slice(1) for column in columns(rows)], 1)):
        got = turn_gae(*arguments, gamma=gamma, lam=lam, bootstrap_values=after[start:])
        for i, row in enumerate(rows[start:]):
            want = slow(row, gamma, lam, float(after[start + i]))
            for column, numbers in zip(got, want, strict=True):
                assert_allclose(column[i].as_py(), numbers, rtol=1e-5, atol=1e-5)


@given(
    turns=st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4), max_size=6),
    gap=st.integers(1, 3),
    gamma=fraction,
    lam=fraction,
)
@settings(deadline=None, max_examples=80)
def test_c02_equals_gae_on_the_compressed_sequence(turns, gap, gamma, lam):
    """One token a turn, without what lies between: its reward the turn's, in float32 as stored, its value its first."""
    row = [token for turn in turns for token in [*[(9.0, 9.0, False)] * gap, *((r, v, True) for r, v in turn)]]
    spoken = turn_gae(*columns([row]), gamma=gamma, lam=lam)
    short = [(float(np.float32(sum(r for r, _ in turn))), turn[0][1], True) for turn in turns]
    compressed = gae(*columns([short]), gamma=gamma, lam=lam)
    starts = [i for i, (_, _, said) in enumerate(row) if said and not row[i - 1][2]]
    for got, want in zip(spoken, compressed, strict=True):
        assert_allclose(np.array(got[0].as_py())[starts], want[0].as_py(), atol=1e-6, rtol=1e-6)


def test_with_a_token_a_turn_the_unit_does_not_matter(floats, masks):
    arguments = floats([0, 0.5, 0, 1, 0, 2]), floats([0, 0.1, 0, 0.4, 0, 0.3]), masks("010101")
    for got, want in zip(turn_gae(*arguments, gamma=0.9), gae(*arguments, gamma=0.9), strict=True):
        assert got.to_pylist() == want.to_pylist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gamma": 1.1}, "gamma 1.1"),
        ({"values": None}, "values: missing; GAE needs"),
        ({"values": pa.array([[0.0, 1.0], [2.0, 3.0]])}, "values: row 1 has 2 tokens, action_mask 1"),
        ({"token_rewards": pa.array([[0.0, 1.0]])}, "token_rewards: 1 rows for 2"),
        ({"bootstrap_values": np.zeros(3)}, "bootstrap_values"),
    ],
)
def test_errors_name_the_argument(floats, masks, change, says):
    arguments = {"token_rewards": floats([0, 1], [1]), "values": floats([0, 0], [0]), "action_mask": masks("11", "1")}
    with pytest.raises(ValueError, match=says):
        turn_gae(**(arguments | change))
