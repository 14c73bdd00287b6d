"""The advantages step: estimators by name, exclusions, truncation, whitening; expected values worked by hand."""

from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest
from numpy.testing import assert_allclose

from data.config import AdvantageConfig
from ops.advantages import ESTIMATORS, AdvantageBatch, AdvantageColumns, AdvantageOptions, Estimate, estimate
from ops.masked import spread

NAN = np.nan


@pytest.fixture
def worked(floats, masks) -> AdvantageBatch:
    """The worked example of schema.md."""
    return AdvantageBatch(
        trajectory_id=pa.array(["A/0", "A/1", "B/0", "B/1"]),
        group_id=pa.array(["A", "A", "B", "B"]),
        purpose=pa.array(["train"] * 4).dictionary_encode(),
        rewards=np.array([1.0, 0.0, 1.0, NAN]),
        truncated=np.array([False, True, False, False]),
        action_mask=masks("000111", "00011", "0011100011", "0011"),
        values=floats(
            [0, 0, 0, 0.2, 0.5, 0.8], [0, 0, 0, 0.2, 0.4], [0, 0, 0.1, 0.2, 0.3, 0, 0, 0, 0.4, 0.6], [0, 0, 0.1, 0.1]
        ),
    )


def tokens(columns: AdvantageColumns) -> list[list[float]]:
    return columns.token_advantages.to_pylist()


def test_worked_example_with_gae(worked):
    got = estimate("gae", worked, AdvantageOptions())
    expected = [
        [0, 0, 0, 0.7655, 0.49, 0.2],
        [0, 0, 0, -0.18, -0.4],
        [0, 0, 0.7825275, 0.71845, 0.651, 0, 0, 0, 0.58, 0.4],
        [0, 0, 0, 0],
    ]
    for row, numbers in zip(tokens(got), expected, strict=True):
        assert_allclose(row, numbers, atol=1e-6)
    assert_allclose(got.returns[2].as_py(), [0, 0, 0.8825275, 0.91845, 0.951, 0, 0, 0, 0.98, 1], atol=1e-6)
    assert got.returns[3].as_py() == [0, 0, 0, 0]
    assert got.token_rewards.to_pylist() == [[0] * 5 + [1], [0] * 5, [0] * 9 + [1], [0] * 4]
    # 1.4555 / 3; -.58 / 2; 3.1319775 / 5
    assert_allclose(got.advantage, [0.4851667, -0.29, 0.6263955, 0], atol=1e-6)
    assert got.loss_mask.to_pylist() == [*worked.action_mask.to_pylist()[:3], [False] * 4]
    assert (got.excluded.tolist(), got.reason.to_pylist()) == ([False] * 3 + [True], [None] * 3 + ["failed"])
    assert (got.group_mean.tolist(), got.group_std.tolist()) == ([0.5, 0.5, 1, 1], [0.5, 0.5, 0, 0])
    assert (got.group_finite.tolist(), got.unplaced) == ([2, 2, 1, 1], 0)


@pytest.mark.parametrize(("name", "scale"), [("group", 2.0), ("group_center", 1.0)])
def test_worked_example_with_groups(worked, name, scale):
    # Group A: mean .5, std .5. Group B has one finite reward.
    got = estimate(name, worked, AdvantageOptions(eps=0.0))
    a = 0.5 * scale
    assert tokens(got) == [[0, 0, 0, a, a, a], [0, 0, 0, -a, -a], [0] * 10, [0] * 4]
    assert got.advantage.tolist() == [a, -a, 0, 0]
    assert got.returns is None


def test_worked_example_with_global(worked):
    # finite: 1 0 1, mean 2/3, std sqrt(2)/3: .70711 -1.41421 .70711
    got = estimate("global", worked, AdvantageOptions())
    assert_allclose(got.advantage, [0.70711, -1.41421, 0.70711, 0], atol=1e-5)


def test_c12_failed_trajectory_is_nowhere(worked, floats):
    # The failed row's values may be anything.
    values = worked.values.to_pylist()
    values[3] = [NAN, 1e30, NAN, NAN]
    broken = replace(worked, values=floats(*values))
    assert tokens(estimate("gae", broken, AdvantageOptions())) == tokens(estimate("gae", worked, AdvantageOptions()))
    got = estimate("gae", broken, AdvantageOptions(whiten=True))
    assert np.isfinite(np.concatenate(tokens(got))).all()
    assert tokens(got)[3] == [0, 0, 0, 0]


def test_whitening_is_over_the_loss_mask(worked):
    # B/1 failed, A/1 masked: A/0 and B/0 remain. Their 8 numbers, worked out by numpy as an independent reference.
    got = estimate("gae", worked, AdvantageOptions(whiten=True, mask_truncated=True))
    kept = np.array([0.7655, 0.49, 0.2, 0.7825275, 0.71845, 0.651, 0.58, 0.4])
    white = (kept - kept.mean()) / (kept.std() + 1e-6)
    assert_allclose(tokens(got)[0][3:], white[:3], atol=1e-5)
    assert_allclose(np.array(tokens(got)[2])[[2, 3, 4, 8, 9]], white[3:], atol=1e-5)
    assert tokens(got)[1] == [0] * 5


def test_c13_whitening_one_token_is_defined(worked, floats, masks):
    one = AdvantageBatch(
        pa.array(["A/0"]), pa.array(["A"]), pa.array(["train"]), np.array([1.0]), np.array([False]), masks("01"), None
    )
    got = estimate("gae", replace(one, values=floats([0, 0.25])), AdvantageOptions(whiten=True))
    assert tokens(got) == [[0, 0]]
    assert got.returns.to_pylist() == [[0, 1]]
    failed = replace(one, values=floats([0, 0.25]), rewards=np.array([NAN]))
    assert tokens(estimate("gae", failed, AdvantageOptions(whiten=True))) == [[0, 0]]


def test_c03_masking_out_the_truncated_leaves_the_recursion_alone(worked):
    plain, masked = (estimate("gae", worked, AdvantageOptions(mask_truncated=flag)) for flag in (False, True))
    assert tokens(masked) == tokens(plain)
    assert masked.loss_mask.to_pylist()[1] == [False] * 5
    assert (masked.advantage[1], masked.excluded[1]) == (0, False)
    # and it stays in its group's statistics
    assert masked.group_mean.tolist() == plain.group_mean.tolist()


def test_c06_bootstrap_only_where_truncated(worked):
    # A/1: V .2 .4, after it .6, lam 1: A_1 = .6 - .4 = .2, A_0 = .4 - .2 + .2 = .4
    batch = replace(worked, bootstrap_values=np.array([9, 0.6, 9, NAN]))
    got = estimate("gae", batch, AdvantageOptions(lam=1, bootstrap_truncated=True))
    assert_allclose(tokens(got)[0][3:], [0.8, 0.5, 0.2], atol=1e-6)
    assert_allclose(tokens(got)[1][3:], [0.4, 0.2], atol=1e-6)
    off = estimate("gae", batch, AdvantageOptions(lam=1))
    assert_allclose(tokens(off)[1][3:], [-0.2, -0.4], atol=1e-6)


def test_gae_options_are_passed_on(worked):
    # gamma .5, lam 0, lam_critic 1 on A/0: A = .25 - .2, .4 - .5, .2; R = .25, .5, 1
    got = estimate("gae", worked, AdvantageOptions(gamma=0.5, lam=0, lam_critic=1))
    assert_allclose(tokens(got)[0][3:], [0.05, -0.1, 0.2], atol=1e-6)
    assert_allclose(got.returns[0].as_py()[3:], [0.25, 0.5, 1], atol=1e-6)
    # 2 actions, alpha 1: lam .5 on A/1: A = .4 - .2 + .5 * -.4 = 0
    got = estimate("gae", worked, AdvantageOptions(length_alpha=1.0))
    assert_allclose(tokens(got)[1][3:], [0, -0.4], atol=1e-6)


def test_other_purposes_are_left_out(worked):
    batch = replace(worked, purpose=pa.array(["train", "eval", "train", "train"]))
    got = estimate("group", batch, AdvantageOptions())
    assert got.reason.to_pylist() == [None, "purpose eval", None, "failed"]
    assert got.advantage.tolist() == [0, 0, 0, 0]
    assert got.group_finite.tolist() == [1, 1, 1, 1]


def test_token_rewards_are_parts_of_the_total(worked, floats):
    """A/1 has 3.5 in all, 3 of it earned on its first action, so .5 lies on its last one; A/0 has all of its 1 there.

    The group compares totals, 1 against 3.5. GAE: A_1 = .5 - .4 = .1, A_0 = 3 + .4 - .2 + .95 * .1 = 3.295. B/1 failed.
    """
    parts = floats([0] * 6, [0, 0, 0, 3, 0], [0] * 10, [5] * 4)
    batch = replace(worked, rewards=np.array([1.0, 3.5, 1.0, NAN]), token_rewards=parts)
    grouped = estimate("group", batch, AdvantageOptions(eps=0.0))
    assert grouped.advantage.tolist() == [-1, 1, 0, 0]
    assert grouped.group_mean.tolist()[:2] == [2.25, 2.25]
    whole = estimate("group", replace(batch, token_rewards=None), AdvantageOptions(eps=0.0))
    assert tokens(whole) == tokens(grouped)
    got = estimate("gae", batch, AdvantageOptions())
    assert_allclose(tokens(got)[1], [0, 0, 0, 3.295, 0.1], atol=1e-6)
    assert got.token_rewards.to_pylist() == [[0] * 5 + [1], [0, 0, 0, 3, 0.5], [0] * 9 + [1], [0] * 4]


def test_rewards_of_turns_and_a_length_penalty_add_up_once(worked, floats):
    """B/0 earned -.25 in its first turn and 1 in its second, less a penalty of .5: .25 in all, and .5 at its end.

    Turns as steps, gamma .9, lam .5, values .1 and .4 at their first tokens: A_2 = .5 - .4 = .1, R_2 = .5;
    A_1 = -.25 + .9 * .4 - .1 + .45 * .1 = .055, R_1 = .155.
    """
    parts = floats([0] * 6, [0] * 5, [0, 0, 0, 0, -0.25, 0, 0, 0, 0, 1], [0] * 4)
    batch = replace(worked, rewards=np.array([1.0, 0.0, 0.25, NAN]), token_rewards=parts)
    got = estimate("gae", batch, AdvantageOptions(gamma=0.9, lam=0.5, step_unit="turn"))
    assert got.token_rewards.to_pylist()[2] == [0, 0, 0, 0, -0.25, 0, 0, 0, 0, 0.5]
    assert_allclose(tokens(got)[2], [0, 0, 0.055, 0.055, 0.055, 0, 0, 0, 0.1, 0.1], atol=1e-6)
    assert_allclose(got.returns[2].as_py(), [0, 0, 0.155, 0, 0, 0, 0, 0, 0.5, 0], atol=1e-6)
    # One turn: A = 1 - .2, R = 1. Its mean over the tokens is itself.
    assert_allclose(tokens(got)[0][3:], [0.8] * 3, atol=1e-6)
    assert_allclose(got.returns[0].as_py()[3:], [1, 0, 0], atol=1e-6)
    assert_allclose(got.advantage[:1], [0.8], atol=1e-6)


def test_unplaced_rewards_are_counted(worked, masks):
    batch = replace(worked, action_mask=masks("000000", "00011", "0011100011", "0000"))
    got = estimate("gae", batch, AdvantageOptions())
    assert (got.unplaced, got.advantage[0], got.excluded[0]) == (1, 0, False)


def test_chunked_columns_and_dictionary_ids(worked):
    def halves(column: pa.Array) -> pa.ChunkedArray:
        return pa.chunked_array([column.slice(0, 1), column.slice(1)])

    names = ("trajectory_id", "group_id", "purpose", "action_mask", "values")
    batch = replace(worked, **{name: halves(getattr(worked, name)) for name in names})
    for name in ESTIMATORS:
        assert tokens(estimate(name, batch, AdvantageOptions())) == tokens(estimate(name, worked, AdvantageOptions()))


def test_table_has_the_columns_of_the_schema(worked):
    for name in ("gae", "group"):
        table = estimate(name, worked, AdvantageOptions()).table()
        assert table.column_names == [
            "trajectory_id", "token_rewards", "token_advantages", "returns", "loss_mask", "advantage",
            "group_id", "group_mean", "group_std", "group_finite", "excluded", "reason",
        ]  # fmt: skip
        assert table["returns"].type == pa.list_(pa.float32())
        assert table["returns"].null_count == (4 if name == "group" else 0)


def test_a_new_estimator_is_a_function_and_a_name(worked, monkeypatch):
    def raw_reward(batch: AdvantageBatch, options: AdvantageOptions) -> Estimate:
        return Estimate(spread(np.nan_to_num(batch.rewards), batch.action_mask))

    monkeypatch.setitem(ESTIMATORS, "raw_reward", raw_reward)
    assert estimate("raw_reward", worked, AdvantageOptions()).advantage.tolist() == [1, 0, 1, 0]


def test_options_mirror_the_config():
    ours = {field.name: field.default for field in fields(AdvantageOptions)}
    theirs = AdvantageConfig().model_dump(exclude={"estimator"})
    assert ours == theirs
    assert AdvantageConfig().estimator in ESTIMATORS


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("grupo", {}, "estimator 'grupo'.*did you mean 'group'"),
        ("zzz", {}, f"estimator 'zzz': it must be one of {', '.join(ESTIMATORS)}$"),
        ("gae", {"values": None}, "values: missing"),
        ("gae", {"rewards": np.zeros(3)}, "rewards: 3 rows for 4 trajectories"),
        ("group", {"truncated": np.zeros(5, bool)}, "truncated: 5 rows"),
    ],
)
def test_errors(worked, name, change, says):
    with pytest.raises(ValueError, match=says):
        estimate(name, replace(worked, **change), AdvantageOptions())


def test_bootstrap_without_values_is_refused(worked):
    with pytest.raises(ValueError, match="bootstrap_values: missing"):
        estimate("gae", worked, AdvantageOptions(bootstrap_truncated=True))
    missing = replace(worked, bootstrap_values=np.full(4, NAN))
    with pytest.raises(ValueError, match="bootstrap_values: nan in row 1"):
        estimate("gae", missing, AdvantageOptions(bootstrap_truncated=True))
