"""Metrics; expected values worked by hand."""

import math

import numpy as np
import pytest

from ops.metrics import (
    advantage_metrics,
    describe,
    explained_variance,
    group_metrics,
    logprob_gap,
    policy_metrics,
    reward_metrics,
    rollout_metrics,
    value_clip_fraction,
)
from ops.ragged import from_rows

NAN = np.nan


def test_c12_reward_metrics_over_finite_rewards():
    # 1 0 2 finite: mean 1, population std sqrt(2/3)
    got = reward_metrics(np.array([1.0, 0, NAN, 2, np.inf]), {"format": np.array([1, NAN, NAN, 0.0, NAN])})
    assert got == {
        "reward/mean": 1,
        "reward/std": pytest.approx(math.sqrt(2 / 3)),
        "reward/min": 0,
        "reward/max": 2,
        "reward/format/mean": 0.5,
        "reward/format/std": 0.5,
        "reward/format/min": 0,
        "reward/format/max": 1,
        "reward/failed": 2,
    }


def test_nothing_to_measure_is_left_out():
    assert reward_metrics(np.array([NAN])) == {"reward/failed": 1}
    assert describe("x", np.zeros(0)) == {}
    assert policy_metrics(np.zeros(0), np.zeros(0), np.zeros(0), 0.2, 0.2) == {}
    assert rollout_metrics(np.zeros(0), np.zeros(0, bool), np.zeros(0, int)) == {}


def test_group_metrics():
    # group 0: 1 1 NaN (two finite, flat); 1: 1 0; 2: .5 alone; 3: .1 three times; 4: failed
    rewards = np.array([1, 1, NAN, 1, 0, 0.5, 0.1, 0.1, 0.1, NAN])
    groups = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3, 4])
    assert group_metrics(rewards, groups) == {
        "groups/count": 3,
        "groups/zero_std": 2,
        "groups/zero_std_ratio": pytest.approx(2 / 3),
    }
    assert group_metrics(np.array([1.0]), np.array([0])) == {"groups/count": 0, "groups/zero_std": 0}


def test_rollout_metrics():
    got = rollout_metrics(np.array([2, 4, 9, 1]), np.array([0, 0, 1, 0], bool), np.array([1, 1, 3, 2]))
    assert got == {
        "response_length/mean": 4,
        "response_length/max": 9,
        "turns/mean": 1.75,
        "turns/max": 3,
        "truncated/ratio": 0.25,
        "turns/count_1": 2,
        "turns/count_2": 1,
        "turns/count_3": 1,
    }


def test_advantage_metrics_read_the_loss_mask_only():
    mask = from_rows([[0, 1, 1], [1]], bool)
    advantages = from_rows([[NAN, 1, 2], [3]], np.float32)
    # returns 1 2 3, values 1 2 2: residuals 0 0 1, var 2/9 against 2/3 -> 2/3
    got = advantage_metrics(
        advantages,
        mask,
        values=from_rows([[9, 1, 2], [2]], np.float32),
        returns=from_rows([[9, 1, 2], [3]], np.float32),
    )
    assert got == {
        "advantage/mean": 2,
        "advantage/std": pytest.approx(math.sqrt(2 / 3)),
        "value/mean": pytest.approx(5 / 3),
        "return/mean": 2,
        "value/explained_variance": pytest.approx(2 / 3),
    }
    assert set(advantage_metrics(advantages, mask)) == {"advantage/mean", "advantage/std"}
    assert advantage_metrics(advantages, from_rows([[0, 0, 0], [0]], bool), advantages, advantages) == {}


def test_explained_variance():
    returns = np.array([0.0, 1.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.array([5.0, 5.0]), returns) == 0
    # residuals 1 -1 (var 1) against var .25: -3
    assert explained_variance(np.array([-1.0, 2.0]), returns) == -3
    # all returns equal: 0, though 3 x .1 has a rounded variance above 0
    assert explained_variance(np.zeros(3), np.full(3, 0.1)) == 0
    assert explained_variance(np.zeros(0), np.zeros(0)) == 0


def test_logprob_gap():
    mask = from_rows([[0, 1, 1], [1]], bool)
    old = from_rows([[0, -1.5, -2], [-0.5]], np.float32)
    engine = from_rows([[-9, -1, -2], [-1.5]], np.float32)
    assert logprob_gap(old, engine, mask) == {"engine_logprob_gap/mean": 0.5, "engine_logprob_gap/max": 1}


def test_policy_metrics():
    # ratios 1.5 (A 1: cut above), .5 (A -1: cut below), 1.5 (A -1: not cut), 1
    d = np.log([1.5, 0.5, 1.5, 1.0])
    got = policy_metrics(-3 + d, np.full(4, -3.0), np.array([1.0, -1, -1, 1]), 0.2, 0.28)
    assert got["ratio/mean"] == pytest.approx(1.125)
    assert got["ratio/std"] == pytest.approx(math.sqrt((0.375**2 * 2 + 0.625**2 + 0.125**2) / 4))
    assert (got["ratio/min"], got["ratio/max"]) == (pytest.approx(0.5), pytest.approx(1.5))
    assert (got["clip_fraction/low"], got["clip_fraction/high"]) == (0.25, 0.25)
    # d^2 / 2: .0822007 (ln 1.5) twice, .2402265 (ln .5); e^d - 1 - d: .0945349 twice, .1931472
    assert got["approx_kl/k2"] == pytest.approx((2 * 0.0822007 + 0.2402265) / 4, abs=1e-6)
    assert got["approx_kl/k3"] == pytest.approx((2 * 0.0945349 + 0.1931472) / 4, abs=1e-6)


def test_c17_approx_kl_is_not_negative_and_0_on_policy():
    same = policy_metrics(np.array([-1.0, -2.0]), np.array([-1.0, -2.0]), np.ones(2), 0.2, 0.2)
    assert (same["approx_kl/k2"], same["approx_kl/k3"], same["ratio/std"]) == (0, 0, 0)
    assert (same["ratio/min"], same["ratio/max"]) == (1, 1)


def test_value_clip_fraction():
    # math.md 5: (.9, .2, 1) is cut (V_c = .4); (.3, .2, 1) is not moved; (-.5, .2, 1) and (.9, .2, .3) have V worse
    values, returns = np.array([0.9, 0.3, -0.5, 0.9]), np.array([1, 1, 1, 0.3])
    assert value_clip_fraction(values, np.full(4, 0.2), returns, 0.2) == 0.25
    assert value_clip_fraction(np.zeros(0), np.zeros(0), np.zeros(0), 0.2) == 0
