"""Losses against math.md 5's golden numbers; aggregation that does not depend on the split (C15)."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from ops.losses import (
    AGGREGATIONS,
    LossOptions,
    aggregate,
    ppo_clip,
    reinforce,
    step_denominator,
    value_loss,
)
from ops.packing import pack
from ops.ragged import Ragged, from_rows, offsets_of

DAPO = LossOptions(clip_low=0.2, clip_high=0.28)


def clipped(ratio: float, advantage: float, options: LossOptions = DAPO) -> float:
    return float(ppo_clip(torch.tensor([ratio]).log(), torch.zeros(1), torch.tensor([advantage]), options))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.5, 1.0, -1.28), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8), (1.0, 2.0, -2.0), (1.1, -1.0, 1.1)],
)
def test_ppo_clip_golden(ratio, advantage, loss):
    assert clipped(ratio, advantage) == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    # c = 3: only A < 0 and a ratio above 3 are cut
    [(5.0, -1.0, 3.0), (5.0, -2.0, 6.0), (2.0, -1.0, 2.0), (5.0, 1.0, -1.28), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8)],
)
def test_dual_clip(ratio, advantage, loss):
    options = LossOptions(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert clipped(ratio, advantage, options) == pytest.approx(loss, abs=1e-6)


def test_ppo_clip_gradient():
    # d loss / d log pi = -A r where not clipped, else 0
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    logprobs = ratios.log().requires_grad_()
    ppo_clip(logprobs, torch.zeros(4), torch.tensor([1.0, -1, 1, -1]), DAPO).sum().backward()
    assert_allclose(logprobs.grad, [0, 1.5, -0.5, 0], atol=1e-6)


def test_ratio_is_exactly_1_on_policy():
    logprobs = torch.tensor([-0.3, -7.1, -0.0001])
    assert ppo_clip(logprobs, logprobs, torch.tensor([1.0, -2, 3]), DAPO).tolist() == [-1, 2, -3]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("new", "old"), [(-0.5, -500.0), (-500.0, -0.5)])
def test_extreme_ratio_has_finite_loss_and_gradient(new, old, advantage):
    logprobs = torch.tensor([new], requires_grad=True)
    loss = ppo_clip(logprobs, torch.tensor([old]), torch.tensor([advantage]), DAPO).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def test_reinforce():
    # A 2, log pi -.5: loss 1, gradient -2, whatever the old log-prob
    logprobs = torch.tensor([-0.5], requires_grad=True)
    loss = reinforce(logprobs, torch.tensor([-3.0]), torch.tensor([2.0]), DAPO)
    loss.sum().backward()
    assert (loss.item(), logprobs.grad.item()) == (1.0, -2.0)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss"),
    [(0.9, 0.2, 1.0, 0.18), (0.3, 0.2, 1.0, 0.245), (-0.5, 0.2, 1.0, 1.125), (0.9, 0.2, 0.3, 0.18)],
)
def test_value_loss_golden(value, old, target, loss):
    got = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), 0.2)
    assert got.item() == pytest.approx(loss, abs=1e-6)


def test_value_loss_without_clip():
    # .5 * (.9 - 1)^2 = .005
    assert value_loss(torch.tensor([0.9]), torch.tensor([0.2]), torch.tensor([1.0]), None).item() == pytest.approx(
        0.005
    )


def ratio_of(mode: str, rows: list[list[float]], masks: list[list[int]]) -> float:
    packed, mask = from_rows(rows, np.float32), from_rows(masks, bool)
    numerator, denominator = aggregate(
        torch.from_numpy(packed.values), torch.from_numpy(mask.values), torch.from_numpy(packed.offsets), mode, 4
    )
    assert denominator.item() == step_denominator(mask, np.arange(len(rows)), mode)
    return float(numerator / denominator)


@pytest.mark.parametrize(
    ("mode", "loss"), [("token_mean", 2.0), ("seq_mean_token_mean", 2.25), ("seq_mean_token_sum", 0.75)]
)
def test_aggregation_golden(mode, loss):
    assert ratio_of(mode, [[1, 2], [3]], [[1, 1], [1]]) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("mode", "loss"),
    # (1 + 3) / 2 tokens; ((1 + 3) / 2 + 0 + 0) / 3 rows; ((1 + 3) / 4 + 0 + 0) / 3 rows
    [("token_mean", 2.0), ("seq_mean_token_mean", 2 / 3), ("seq_mean_token_sum", 1 / 3)],
)
def test_empty_and_masked_rows_count_and_contribute_nothing(mode, loss):
    assert ratio_of(mode, [[1, np.nan, 3], [], [np.inf]], [[1, 0, 1], [], [0]]) == pytest.approx(loss)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_c07_gradient_reaches_exactly_the_masked_in_tokens(mode):
    # The first answer token (index 2) included, prompt and padding not.
    mask = torch.tensor([0, 0, 1, 1, 0], dtype=torch.bool)
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    per_token = reinforce(logprobs, logprobs.detach(), torch.ones(5), DAPO)
    aggregate(per_token, mask, torch.tensor([0, 5]), mode, 2)[0].backward()
    assert ((logprobs.grad != 0) == mask).all()


def test_c01_masked_garbage_does_not_reach_the_gradient():
    values = torch.tensor([0.5, float("nan"), float("inf")], requires_grad=True)
    per_token = value_loss(values, torch.zeros(3), torch.ones(3), None)
    numerator, _ = aggregate(per_token, torch.tensor([True, False, False]), torch.tensor([0, 3]), "token_mean")
    numerator.backward()
    assert (numerator.item(), values.grad[0].item()) == (0.125, -0.5)


def test_c13_step_without_a_token_has_denominator_1():
    mask = from_rows([[0, 0], []], bool)
    assert step_denominator(mask, np.array([0, 1]), "token_mean") == 1.0
    assert step_denominator(mask, np.array([], np.int64), "seq_mean_token_mean") == 1.0
    assert ratio_of_nothing() == 0.0


def ratio_of_nothing() -> float:
    numerator, denominator = aggregate(
        torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2]), "token_mean"
    )
    return float(numerator / max(denominator, 1))


@pytest.fixture(scope="module")
def step() -> dict[str, Ragged]:
    """64 trajectories of 0 to 40 tokens with random masks, one of them fully masked, and a linear policy's features."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 41, 64)
    lengths[:2] = 0, 12
    offsets = offsets_of(lengths)
    n = int(offsets[-1])
    mask = rng.random(n) < 0.6
    mask[offsets[1] : offsets[2]] = False
    columns = {"features": rng.normal(size=(n, 8)), "old": -rng.random(n) * 3, "advantages": rng.normal(size=n)}
    ragged = {name: Ragged(values.astype(np.float32), offsets) for name, values in columns.items()}
    return ragged | {"mask": Ragged(mask, offsets)}


def step_gradient(step: dict[str, Ragged], micro_batches: list[np.ndarray], mode: str) -> np.ndarray:
    theta = torch.full((8,), 0.1, requires_grad=True)
    whole = step_denominator(step["mask"], np.concatenate(micro_batches), mode)
    for rows in micro_batches:
        micro = {name: column.take(rows) for name, column in step.items()}
        x, old, advantages, mask = (
            torch.from_numpy(micro[k].values) for k in ("features", "old", "advantages", "mask")
        )
        logprobs = torch.nn.functional.logsigmoid(x @ theta)
        per_token = ppo_clip(logprobs, old, advantages, DAPO)
        numerator, _ = aggregate(per_token, mask, torch.from_numpy(micro["mask"].offsets), mode, 100)
        (numerator / whole).backward()
    return theta.grad.double().numpy()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_c15_gradient_does_not_depend_on_the_split(step, mode):
    rows = np.arange(64)
    reference = step_gradient(step, [rows], mode)
    splits = [np.array_split(rows, n) for n in (2, 4, 8, 64)]
    splits += [pack(step["mask"].lengths, rows, 150), [rows[::-1]], [rows[1::2], rows[::2]]]
    for split in splits:
        difference = step_gradient(step, split, mode) - reference
        assert np.linalg.norm(difference) <= 1e-6 * np.linalg.norm(reference)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_c15_two_ranks_sum_to_one(step, mode):
    # Each rank has half of the rows, but divides by the denominator of both.
    rows, mask = np.arange(64), step["mask"]
    totals = []
    for ranks in ([rows], [rows[:40], rows[40:]]):
        pairs = []
        for mine in ranks:
            values, kept = step["advantages"].take(mine), mask.take(mine)
            pairs.append(
                aggregate(
                    torch.from_numpy(values.values),
                    torch.from_numpy(kept.values),
                    torch.from_numpy(kept.offsets),
                    mode,
                    9,
                )
            )
        assert float(sum(d for _, d in pairs)) == step_denominator(mask, rows, mode)
        totals.append(float(sum(n for n, _ in pairs)))
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_c15_aggregate_equals_the_definition(step):
    losses, masks = step["advantages"], step["mask"]
    kept = [losses.row(i)[masks.row(i)].astype(float).tolist() for i in range(64)]
    expected = {
        "token_mean": sum(map(sum, kept)) / sum(map(len, kept)),
        "seq_mean_token_mean": sum(sum(row) / len(row) for row in kept if row) / 64,
        "seq_mean_token_sum": sum(map(sum, kept)) / 100 / 64,
    }
    arguments = [torch.from_numpy(a) for a in (losses.values, masks.values, losses.offsets)]
    for mode, value in expected.items():
        numerator, denominator = aggregate(*arguments, mode, 100)
        assert float(numerator / denominator) == pytest.approx(value, rel=1e-5)


def test_unknown_mode_and_missing_horizon():
    arguments = (torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="aggregation 'mean': it must be one of token_mean"):
        aggregate(*arguments, "mean")
    with pytest.raises(ValueError, match="horizon None"):
        aggregate(*arguments, "seq_mean_token_sum")
    with pytest.raises(ValueError, match="aggregation 'mean'"):
        step_denominator(from_rows([[1]], bool), np.array([0]), "mean")
