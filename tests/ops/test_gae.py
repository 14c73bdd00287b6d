"""GAE against math.md's golden numbers, closed forms and a slow definition in plain Python."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from ops.gae import gae

GOLDEN = [
    # rewards, values, gamma, lam, advantages, returns (math.md 3)
    ([0, 0, 1], [0.2, 0.5, 0.8], 1, 1, [0.8, 0.5, 0.2], [1, 1, 1]),
    ([0, 0, 1], [0.2, 0.5, 0.8], 1, 0, [0.3, 0.3, 0.2], [0.5, 0.8, 1]),
    ([0, 0, 1], [0.2, 0.5, 0.8], 1, 0.95, [0.7655, 0.49, 0.2], [0.9655, 0.99, 1]),
    ([0, 0, 1], [0, 0, 0], 0.9, 1, [0.81, 0.9, 1], [0.81, 0.9, 1]),
    ([0, 0, 1], [0, 0, 0], 0.9, 0.5, [0.2025, 0.45, 1], [0.2025, 0.45, 1]),
    ([1, 1, 1], [2, 2, 2], 1, 0, [1, 1, -1], [3, 3, 1]),
]


@pytest.mark.parametrize(("rewards", "values", "gamma", "lam", "advantages", "returns"), GOLDEN)
def test_golden_numbers(floats, masks, rewards, values, gamma, lam, advantages, returns):
    got = gae(floats(rewards), floats(values), masks("111"), gamma=gamma, lam=lam)
    assert_allclose(got[0][0].as_py(), advantages, atol=1e-6)
    assert_allclose(got[1][0].as_py(), returns, atol=1e-6)


def test_defaults_are_gamma_1_and_lam_095(floats, masks):
    got, _ = gae(floats([0, 0, 1]), floats([0.2, 0.5, 0.8]), masks("111"))
    assert_allclose(got[0].as_py(), [0.7655, 0.49, 0.2], atol=1e-6)


def test_schema_worked_example(floats, masks):
    # schema.md, gamma 1, lam .95. B/1 has failed: its reward is placed nowhere, so that A_1 = 0 - .1 = -.1 and
    # A_0 = 0 + .1 - .1 + .95 * -.1 = -.095 (`estimate` then excludes the row).
    advantages, returns = gae(
        floats([0] * 5 + [1], [0] * 5, [0] * 9 + [1], [0] * 4),
        floats(
            [7, 7, 7, 0.2, 0.5, 0.8], [7, 7, 7, 0.2, 0.4], [7, 7, 0.1, 0.2, 0.3, 7, 7, 7, 0.4, 0.6], [7, 7, 0.1, 0.1]
        ),
        masks("000111", "00011", "0011100011", "0011"),
        gamma=1,
        lam=0.95,
    )
    expected = [
        [0, 0, 0, 0.7655, 0.49, 0.2],
        [0, 0, 0, -0.18, -0.4],
        # .4; .6 - .4 + .95 * .4 = .58; .4 - .3 + .95 * .58 = .651; .3 - .2 + .95 * .651; .2 - .1 + .95 * .71845
        [0, 0, 0.7825275, 0.71845, 0.651, 0, 0, 0, 0.58, 0.4],
        [0, 0, -0.095, -0.1],
    ]
    for row, numbers in enumerate(expected):
        assert_allclose(advantages[row].as_py(), numbers, atol=1e-6)
    assert_allclose(returns[0].as_py(), [0, 0, 0, 0.9655, 0.99, 1], atol=1e-6)
    assert_allclose(returns[1].as_py(), [0, 0, 0, 0.02, 0], atol=1e-6)
    assert_allclose(returns[2].as_py(), [0, 0, 0.8825275, 0.91845, 0.951, 0, 0, 0, 0.98, 1], atol=1e-6)


@pytest.mark.parametrize("garbage", [100.0, float("nan"), float("inf")])
def test_c01_value_at_a_pad_changes_nothing(floats, masks, garbage):
    # rewards 0 1, V 0 0, lam .95: A = .95, 1; the pad holds V = 100 and gets 0
    advantages, returns = gae(floats([0, 1, garbage]), floats([0, 0, garbage]), masks("110"), gamma=1, lam=0.95)
    assert_allclose(advantages[0].as_py(), [0.95, 1, 0], atol=1e-6)
    assert_allclose(returns[0].as_py(), [0.95, 1, 0], atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.0])
def test_c02_observation_tokens_are_skipped_without_decay(floats, masks, gamma):
    rewards, values = [0.5, 0, 0.25, 1], [0.1, 0.4, 0.3, 0.7]
    whole = gae(
        floats([9, 0.5, 0, 9, 9, 0.25, 9, 1, 9]),
        floats([9, 0.1, 0.4, 9, 9, 0.3, 9, 0.7, 9]),
        masks("011001010"),
        gamma=gamma,
        lam=0.95,
    )
    compressed = gae(floats(rewards), floats(values), masks("1111"), gamma=gamma, lam=0.95)
    for got, want in zip(whole, compressed, strict=True):
        tokens = np.array(got[0].as_py())
        assert_allclose(tokens[[1, 2, 5, 7]], want[0].as_py(), atol=1e-6)
        assert not tokens[[0, 3, 4, 6, 8]].any()
    if gamma == 0:  # A = r - V
        assert_allclose(compressed[0][0].as_py(), [0.4, -0.4, -0.05, 0.3], atol=1e-6)


def test_no_leak_between_trajectories(floats, masks):
    advantages, _ = gae(floats([0, 1], [0.5]), floats([0.2, 0.5], [0.8]), masks("11", "1"), gamma=1, lam=1)
    assert_allclose(advantages[0].as_py(), [0.8, 0.5], atol=1e-6)
    assert_allclose(advantages[1].as_py(), [-0.3], atol=1e-6)


def test_c06_value_after_the_end(floats, masks):
    # No reward, V = .2 .5, gamma .9, lam 1. Ended: A_1 = -.5, A_0 = .45 - .2 - .45 = -.2.
    # Cut, V after it .7: A_1 = .63 - .5 = .13, A_0 = .45 - .2 + .9 * .13 = .367. Two tokens of observation follow.
    rewards, values, mask = (
        floats([0, 0, 0, 0], [0, 0, 0, 0]),
        floats([0.2, 0.5, 5, 5], [0.2, 0.5, 5, 5]),
        masks(*["1100"] * 2),
    )
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=1, bootstrap_values=np.array([0, 0.7]))
    assert_allclose(advantages[0].as_py(), [-0.2, -0.5, 0, 0], atol=1e-6)
    assert_allclose(advantages[1].as_py(), [0.367, 0.13, 0, 0], atol=1e-6)
    assert_allclose(returns[1].as_py(), [0.567, 0.63, 0, 0], atol=1e-6)


def test_lam_critic_is_the_lam_of_the_returns_alone(floats, masks):
    # The golden rows of lam 0 (advantages) and lam 1 (returns).
    rewards, values = floats([0, 0, 1]), floats([0.2, 0.5, 0.8])
    advantages, returns = gae(rewards, values, masks("111"), gamma=1, lam=0, lam_critic=1)
    assert_allclose(advantages[0].as_py(), [0.3, 0.3, 0.2], atol=1e-6)
    assert_allclose(returns[0].as_py(), [1, 1, 1], atol=1e-6)


def test_length_alpha_counts_action_tokens(floats, masks):
    # alpha 1: 2 actions (and 2 others) -> lam .5; 1 action -> 0; 4 actions -> .75. V = 0, so A = lam^k.
    rewards = floats([0, 0, 0, 1], [1], [0, 0, 0, 1])
    values, mask = floats([0] * 4, [0], [0] * 4), masks("0101", "1", "1111")
    advantages, returns = gae(rewards, values, mask, gamma=1, lam=0.2, length_alpha=1)
    assert_allclose(advantages[0].as_py(), [0, 0.5, 0, 1], atol=1e-6)
    assert_allclose(advantages[1].as_py(), [1], atol=1e-6)
    assert_allclose(advantages[2].as_py(), [0.421875, 0.5625, 0.75, 1], atol=1e-6)
    assert_allclose(returns[2].as_py(), [0.421875, 0.5625, 0.75, 1], atol=1e-6)
    # alpha .25 with 2 actions: 1 - 2 < 0 -> lam 0
    advantages, returns = gae(rewards, values, mask, gamma=1, lam=0.2, length_alpha=0.25, lam_critic=1)
    assert_allclose(advantages[0].as_py(), [0, 0, 0, 1], atol=1e-6)
    assert_allclose(returns[0].as_py(), [0, 1, 0, 1], atol=1e-6)


def test_rows_without_tokens_or_actions(floats, masks):
    advantages, returns = gae(floats([], [3, 3], []), floats([], [4, 4], []), masks("", "00", ""))
    assert advantages.to_pylist() == returns.to_pylist() == [[], [0, 0], []]
    assert gae(floats(), floats(), masks())[0].to_pylist() == []


Row = list[tuple[float, float, bool]]
numbers = st.floats(-10, 10, width=32)
rows_of_tokens = st.lists(st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=30), min_size=1, max_size=6)
fraction = st.floats(0, 1)


def slow_gae(row: Row, gamma: float, lam: float, lam_critic: float, after: float) -> tuple[list[float], list[float]]:
    """By the definition, A_t = sum_k (gamma lam)^k delta_{t + k}, over the compressed sequence, in float64."""
    steps = [(reward, value) for reward, value, action in row if action]
    following = [*(value for _, value in steps), after][1:]
    deltas = [reward + gamma * ahead - value for (reward, value), ahead in zip(steps, following, strict=True)]

    def discounted(rate: float, start: int) -> float:
        return sum(rate**k * delta for k, delta in enumerate(deltas[start:]))

    found = iter(
        [(discounted(gamma * lam, i), discounted(gamma * lam_critic, i) + steps[i][1]) for i in range(len(steps))]
    )
    pairs = [next(found) if action else (0.0, 0.0) for _, _, action in row]
    return [a for a, _ in pairs], [r for _, r in pairs]


def columns(rows: list[Row]) -> list[pa.ListArray]:
    types = (pa.float32(), pa.float32(), pa.bool_())
    return [pa.array([[token[i] for token in row] for row in rows], pa.list_(t)) for i, t in enumerate(types)]


def assert_equals_slow(got, rows: list[Row], gamma: float, lam: float, lam_critic: float, after: np.ndarray) -> None:
    advantages, returns = (column.to_pylist() for column in got)
    assert len(advantages) == len(returns) == len(rows)
    for i, row in enumerate(rows):
        want = slow_gae(row, gamma, lam, lam_critic, float(after[i]))
        assert_allclose(advantages[i], want[0], rtol=1e-5, atol=1e-5)
        assert_allclose(returns[i], want[1], rtol=1e-5, atol=1e-5)


@given(rows=rows_of_tokens, gamma=fraction, lam=fraction, lam_critic=fraction, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_equals_the_slow_definition(rows, gamma, lam, lam_critic, seed):
    after = np.random.default_rng(seed).normal(size=len(rows))
    got = gae(*columns(rows), gamma=gamma, lam=lam, lam_critic=lam_critic, bootstrap_values=after)
    assert_equals_slow(got, rows, gamma, lam, lam_critic, after)


@given(rows=rows_of_tokens, data=st.data())
@settings(deadline=None, max_examples=100)
def test_sliced_and_chunked_columns(rows, data):
    start = data.draw(st.integers(0, len(rows)), "start")
    sliced = [column.slice(start) for column in columns(rows)]
    chunked = []
    for column in sliced:  # each column is cut elsewhere
        cut = data.draw(st.integers(0, len(column)), "cut")
        chunked.append(pa.chunked_array([column.slice(0, cut), column.slice(cut)]))
    for arguments in (sliced, chunked):
        assert_equals_slow(
            gae(*arguments, gamma=0.9, lam=0.8), rows[start:], 0.9, 0.8, 0.8, np.zeros(len(rows) - start)
        )


def test_chunked_without_chunks():
    empty = [pa.chunked_array([], pa.list_(t)) for t in (pa.float32(), pa.float32(), pa.bool_())]
    assert gae(*empty)[0].to_pylist() == []


def test_long_trajectory_keeps_its_precision(floats, masks):
    # V = 0, gamma = lam = 1, reward .1 at each of 100,000 tokens: the first return is 10,000 (float32 sums drift by ~1)
    n = 100_000
    advantages, _ = gae(floats([0.1] * n), floats([0] * n), masks("1" * n), gamma=1, lam=1)
    assert_allclose(advantages[0][0].as_py(), 10_000, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gamma": 1.1}, "gamma 1.1"),
        ({"gamma": float("nan")}, "gamma nan"),
        ({"lam": -0.1}, "lam -0.1"),
        ({"lam_critic": 2.0}, "lam_critic 2.0"),
        ({"length_alpha": 0.0}, "length_alpha 0.0"),
        ({"bootstrap_values": np.zeros(3)}, "bootstrap_values"),
        ({"bootstrap_values": np.array([np.nan, 0])}, "bootstrap_values: nan in row 0"),
        ({"values": None}, "values: missing"),
        ({"values": pa.array([[0.0, 1.0], [2.0, 3.0]])}, "values: row 1 has 2 tokens, action_mask 1"),
        ({"values": pa.array([[0.0, 1.0]])}, "values: 1 rows for 2"),
        ({"token_rewards": pa.array([[0.0], [1.0, 2.0]])}, "token_rewards: row 0"),
        ({"token_rewards": pa.array([[0.0, None], [1.0]])}, "token_rewards: 1 null tokens"),
        ({"token_rewards": pa.array([[0.0, 1.0], None])}, "token_rewards: 1 null rows"),
        ({"values": pa.array([0.0, 1.0])}, "values: double; it must be a list column"),
        ({"values": pa.array([["a", "b"], ["c"]])}, "values: list"),
        ({"action_mask": pa.array([[1, 1], [1]])}, "action_mask: list"),
    ],
)
def test_errors_name_the_argument(floats, masks, change, says):
    arguments = {"token_rewards": floats([0, 1], [1]), "values": floats([0, 0], [0]), "action_mask": masks("11", "1")}
    arguments |= change
    with pytest.raises(ValueError, match=says):
        gae(**arguments)


def test_decreasing_offsets_are_refused(floats, masks):
    bad = pa.ListArray.from_arrays(pa.array([0, 2, 1], pa.int32()), pa.array([0, 0], pa.float32()))
    with pytest.raises(ValueError, match="values: list offsets decrease"):
        gae(floats([0, 1], [1]), bad, masks("11", "1"))


def test_inputs_are_left_alone(floats, masks):
    rewards, values = floats([0, 1]), floats([0.5, 0.25])
    gae(rewards, values, masks("11"))
    assert (rewards.to_pylist(), values.to_pylist()) == ([[0, 1]], [[0.5, 0.25]])
