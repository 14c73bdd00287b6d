"""The draw: uniform streams, filters and inversion, against hand-worked numbers and a slow reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.engines.contract import SamplingParams
from models.engines.sampling import draw, filtered_logprobs, invert, uniforms

TENTHS = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, max_new_tokens=1, eos_ids=())


def slow_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Plain Python, token by token: temperature, the k likeliest, the fewest of those that reach p, renormalised."""
    scaled = [value / temperature for value in logits]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    likeliest = sorted(range(len(weights)), key=lambda token: (-scaled[token], token))
    kept = likeliest[:top_k] if top_k else likeliest
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += weights[token] / total
        if mass >= top_p and top_p < 1.0:
            break
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(weights))]


def test_uniforms_are_numpys_philox_and_a_longer_stream_starts_with_the_shorter():
    # An independent route to the same definition: numpy documents `random` as 53 bits of each 64-bit word.
    expected = np.random.Generator(np.random.Philox(key=17)).random(9)
    assert uniforms(17, 9).tolist() == expected.tolist()
    assert uniforms(17, 4).tolist() == expected[:4].tolist()
    assert (uniforms(18, 9) != uniforms(17, 9)).all()
    assert uniforms(2**64 - 1, 1).shape == (1,)


@pytest.mark.parametrize(
    ("probs", "uniform", "token"),
    [
        # Cumulative .5 .75 1: below .5 is token 0, from .5 on token 1, from .75 on token 2.
        ([0.5, 0.25, 0.25], 0.0, 0),
        ([0.5, 0.25, 0.25], 0.4999, 0),
        ([0.5, 0.25, 0.25], 0.5, 1),
        ([0.5, 0.25, 0.25], 0.7499, 1),
        ([0.5, 0.25, 0.25], 0.75, 2),
        ([0.5, 0.25, 0.25], 1 - 2**-53, 2),
        # Tokens of probability 0 are never drawn, at either end or in the middle.
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.0, 1),
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.5, 3),
        ([0.0, 0.5, 0.0, 0.5, 0.0], 1 - 2**-53, 3),
        # A total that rounding left below 1: the last uniform still hits the last possible token.
        ([0.1, 0.2, 0.0], 1 - 2**-53, 1),
    ],
)
def test_inversion_by_hand(probs, uniform, token):
    drawn = invert(torch.tensor([probs], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() == [token]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        (2, 1.0, {1: 4 / 7, 3: 3 / 7}),
        (9, 1.0, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        # .4 does not reach .6, .4 + .3 does.
        (0, 0.6, {1: 4 / 7, 3: 3 / 7}),
        (0, 0.75, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        (0, 0.0001, {1: 1.0}),
        # top_p works on what top_k left, renormalised: 4/9 + 3/9 = .778 reaches .75, while .4 + .3 would not.
        (3, 0.75, {1: 4 / 7, 3: 3 / 7}),
    ],
)
def test_filters_by_hand(top_k, top_p, kept):
    probs = filtered_logprobs(TENTHS.log(), top_k, top_p).exp()[0].tolist()
    assert probs == pytest.approx([kept.get(token, 0.0) for token in range(4)], abs=1e-12)


def test_among_equal_tokens_the_lower_id_is_kept():
    assert filtered_logprobs(torch.zeros(1, 4, dtype=torch.float64), 2, 1.0).exp()[0].tolist() == [0.5, 0.5, 0, 0]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.integers(0, 14),
    st.sampled_from([1.0, 0.9993, 0.7993, 0.3137, 0.0507]),  # no k/n: a sum that is p by chance decides nothing
    st.integers(0, 2**64 - 1),
)
def test_draws_agree_with_the_slow_reference(logits, temperature, top_k, top_p, seed):
    uniform = uniforms(seed, 1)
    ids, logprobs = draw(torch.tensor([logits]), torch.from_numpy(uniform), params(temperature, top_p, top_k))
    expected = slow_distribution(logits, temperature, top_k, top_p)
    token = int(ids[0])
    assert expected[token] > 0
    assert logprobs.dtype == torch.float32
    assert logprobs[0].item() == pytest.approx(math.log(expected[token]), abs=1e-5)
    assert logprobs[0] <= 0
    below = sum(expected[:token])
    assert below - 1e-9 <= uniform[0] <= below + expected[token] + 1e-9


def test_greedy_takes_the_likeliest_and_reports_temperature_1():
    logits = TENTHS.log().float()
    ids, logprobs = draw(logits, torch.tensor([0.999], dtype=torch.float64), params(0.0, 0.5, 1))
    assert ids.tolist() == [1]
    assert logprobs.item() == pytest.approx(math.log(0.4), abs=1e-6)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 3, 0.75)])
def test_consecutive_seeds_follow_the_distribution(step, temperature, top_k, top_p):
    seeds = 20_000
    uniform = torch.tensor([uniforms(seed, step + 1)[step] for seed in range(seeds)])
    ids, _ = draw(TENTHS.log().expand(seeds, -1), uniform, params(temperature, top_p, top_k))
    expected = seeds * np.array(slow_distribution(TENTHS.log()[0].tolist(), temperature, top_k, top_p))
    counts = np.bincount(ids.numpy(), minlength=4)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    # Pearson's chi-square: 3 degrees of freedom at most, whose .999 quantile is 16.27.
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 16.27


def test_rows_do_not_touch_each_other():
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 31)))
    uniform = torch.from_numpy(np.random.default_rng(1).random(50))
    ids, logprobs = draw(logits, uniform, params(0.8, 0.9, 7))
    for row in range(50):
        alone = draw(logits[row : row + 1], uniform[row : row + 1], params(0.8, 0.9, 7))
        assert (int(alone[0]), alone[1].item()) == (int(ids[row]), logprobs[row].item())


def test_nan_logits_give_nan_not_a_crash():
    logits = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    for setting in (params(), params(0.0)):
        _, logprobs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), setting)
        assert logprobs.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"temperature": -1.0}, r"sampling.temperature is -1.0; it must be finite, 0 \(greedy\) or more"),
        ({"temperature": math.nan}, "sampling.temperature is nan"),
        ({"temperature": math.inf}, "sampling.temperature is inf"),
        ({"top_p": 0.0}, r"sampling.top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.1}, "sampling.top_p is 1.1"),
        ({"top_k": -1}, r"sampling.top_k is -1; it must be 0 \(off\) or more"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens is 0; it must be at least 1"),
    ],
)
def test_impossible_sampling_is_refused(changes, error):
    fine = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 1, "eos_ids": ()}
    with pytest.raises(ValueError, match=error):
        SamplingParams(**(fine | changes))
