"""Group and global advantages against math.md 4's golden numbers."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from ops.groups import global_, group, group_center, group_numbers, statistics

ONE = np.zeros(4, np.int64)
NAN = np.nan


def one_group(rewards: list[float], **options) -> np.ndarray:
    return group(np.array(rewards), np.zeros(len(rewards), np.int64), **options)


def test_golden_population():
    # mean 1/4, std sqrt(3)/4: .75 / .4330127 = 1.7320508 (less eps: 4e-6)
    assert_allclose(one_group([1, 0, 0, 0]), [1.7321, -0.57735, -0.57735, -0.57735], atol=1e-4)


def test_unbiased_std():
    # 1 0: mean .5, unbiased std sqrt(.5): .70711; population std .5: 1
    assert_allclose(one_group([1, 0], std="unbiased"), [0.70711, -0.70711], atol=1e-5)
    assert_allclose(one_group([1, 0], std="population"), [1, -1], atol=1e-5)


@pytest.mark.parametrize("rewards", [[1.0] * 4, [12.7] * 16, [0.1] * 3, [0.35] * 7, [3.0], []])
@pytest.mark.parametrize("eps", [1e-6, 1e-9, 0.0])
def test_c10_equal_rewards_give_exactly_zero(rewards, eps):
    # The float mean of 16 x 12.7 or 3 x .1 may differ from the reward: a tiny eps would turn that into an advantage.
    for std in ("population", "unbiased"):
        assert one_group(rewards, std=std, eps=eps).tolist() == [0.0] * len(rewards)
        assert global_(np.array(rewards), std=std, eps=eps).tolist() == [0.0] * len(rewards)
    assert group_center(np.array(rewards), np.zeros(len(rewards), np.int64)).tolist() == [0.0] * len(rewards)


def test_c10_float32_rewards_too():
    assert group(np.full(16, 12.7, np.float32), np.zeros(16, np.int64)).tolist() == [0.0] * 16


def test_c10_seven_equal_and_one_zero():
    # p = 7/8: mean .30625, std .35 sqrt(7)/8 = .1157516; .04375 / std = .377964, -.30625 / std = -2.645751
    got = one_group([0.35] * 7 + [0.0])
    assert_allclose(got, [0.377964] * 7 + [-2.645751], atol=5e-5)
    assert len(set(got[:7])) == 1


def test_c12_failed_rewards_leave_the_statistics():
    assert one_group([1, 1, 1, NAN]).tolist() == [0, 0, 0, 0]
    # the statistics of [1, 0]: mean .5, std .5
    assert_allclose(one_group([1, 0, NAN]), [1, -1, 0], atol=1e-5)
    assert_allclose(one_group([1, NAN, 0, np.inf, -np.inf]), [1, 0, -1, 0, 0], atol=1e-5)
    assert one_group([NAN, NAN]).tolist() == [0, 0]
    assert_allclose(group_center(np.array([1, 0, NAN, 1]), ONE), [1 / 3, -2 / 3, 0, 1 / 3])


def test_group_center():
    assert_allclose(group_center(np.array([1.0, 0, 0, 0]), ONE), [0.75, -0.25, -0.25, -0.25])


def test_global_golden():
    rewards = np.array([1.0, 0, 1, 1])
    assert_allclose(global_(rewards, std="unbiased"), [0.5, -1.5, 0.5, 0.5], atol=1e-5)
    assert_allclose(global_(rewards), [0.57735, -1.73205, 0.57735, 0.57735], atol=1e-5)


def test_groups_in_any_order_and_of_any_size():
    # group 0: 1 0 (std .5), group 1: 5 (alone), group 2: 2 2 8 (mean 4, std sqrt 8: -.70711 -.70711 1.41421)
    rewards, groups = np.array([2, 1, 5, 8, 0, 2.0]), np.array([2, 0, 1, 2, 0, 2])
    assert_allclose(group(rewards, groups), [-0.70711, 1, 0, 1.41421, -1, -0.70711], atol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(st.just(NAN), st.integers(-5, 5))), min_size=1, max_size=20))
def test_statistics_equal_the_definition(rows):
    groups = np.array([g for g, _ in rows])
    rewards = np.array([r for _, r in rows], float)
    for kind, ddof in (("population", 0), ("unbiased", 1)):
        seen = statistics(rewards, groups, kind)
        for g in set(groups.tolist()):
            finite = [r for h, r in rows if h == g and r == r]
            assert seen.finite[g] == len(finite)
            if finite:
                mean = sum(finite) / len(finite)
                squares = sum((r - mean) ** 2 for r in finite)
                assert seen.mean[g] == pytest.approx(mean, abs=1e-12)
                assert seen.std[g] == pytest.approx((squares / max(len(finite) - ddof, 1)) ** 0.5, abs=1e-12)
            else:
                assert np.isnan(seen.mean[g])
                assert np.isnan(seen.std[g])


def test_group_numbers():
    ids = pa.array(["b", "a", "b"])
    chunks = [ids.dictionary_encode(), pa.array(["c", "a"]).dictionary_encode()]
    assert group_numbers(ids).tolist() == [0, 1, 0]
    assert group_numbers(pa.chunked_array(chunks)).tolist() == [0, 1, 0, 2, 1]
    assert group_numbers(pa.chunked_array([], pa.string())).tolist() == []
    with pytest.raises(ValueError, match="group_id: 1 null ids"):
        group_numbers(pa.array(["a", None]))


def test_unknown_std():
    with pytest.raises(ValueError, match="std 'sample': it must be one of population, unbiased"):
        one_group([1, 0], std="sample")
