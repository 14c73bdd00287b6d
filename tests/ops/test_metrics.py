"""Metrics; expected values worked by hand."""

import math

import numpy as np
import pytest

from ops.metrics import (
    advantage_metrics,
    describe,
    explained_variance,
    group_metrics,
    reward_metrics,
    rollout_metrics,
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
