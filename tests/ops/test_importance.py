"""Importance weights and their corrections; expected values worked by hand."""

import math

import numpy as np
import pytest

from data.config import CorrectionConfig
from ops.importance import CORRECTIONS, LEVELS, Corrected, CorrectionOptions, correct
from ops.ragged import Ragged, from_rows

# Two trajectories with a prompt token each. Ratios trainer / engine of the action tokens: 4, 1/2, 1 and 1/4, 1/8.
# Products: 4 x 1/2 x 1 = 2, and 1/4 x 1/8 = 1/32.
ACTIONS = from_rows([[0, 1, 1, 1], [0, 1, 1]], bool)
RATIOS = from_rows([[7, 4, 0.5, 1], [7, 0.25, 0.125]], np.float64)
ENGINE = from_rows([[9, -3, -3, -3], [9, -1, -1]], np.float32)


def weigh(kind: str, level: str, **bounds: float) -> Corrected:
    trainer = ENGINE.like((ENGINE.values + np.log(RATIOS.values)).astype(np.float32))
    return correct(trainer, ENGINE, ACTIONS, CorrectionOptions(kind, level, **bounds))


def rows(column: Ragged) -> list[list[float]]:
    return [column.row(i).tolist() for i in range(len(column))]


def test_truncated_by_token() -> None:
    """min(w, 1.5): 1.5 .5 1 | .25 .125; 0 at the prompt."""
    assert rows(weigh("truncate", "token", cap=1.5).weights) == [
        pytest.approx([0, 1.5, 0.5, 1], rel=1e-6),
        pytest.approx([0, 0.25, 0.125], rel=1e-6),
    ]


def test_masked_by_token() -> None:
    """Outside [.2, 2]: the 4 and the .125."""
    assert rows(weigh("mask", "token", low=0.2, high=2).weights) == [
        pytest.approx([0, 0, 0.5, 1], rel=1e-6),
        pytest.approx([0, 0.25, 0], rel=1e-6),
    ]


def test_truncated_by_sequence() -> None:
    """min(2, 1.5) and min(1/32, 1.5), at each of its action tokens."""
    assert rows(weigh("truncate", "sequence", cap=1.5).weights) == [
        pytest.approx([0, 1.5, 1.5, 1.5], rel=1e-6),
        pytest.approx([0, 1 / 32, 1 / 32], rel=1e-6),
    ]


def test_masked_by_sequence() -> None:
    """2.0 (to rounding) is within [.5, 2.1], 1/32 is not: the second trajectory teaches nothing."""
    assert rows(weigh("mask", "sequence", low=0.5, high=2.1).weights) == [
        pytest.approx([0, 2, 2, 2], rel=1e-6),
        [0, 0, 0],
    ]


def test_bounds_of_a_mask_belong_to_it() -> None:
    options = CorrectionOptions("mask", "token", low=0.5, high=2.0)
    assert CORRECTIONS["mask"](np.array([0.499, 0.5, 2.0, 2.001]), options).tolist() == [0, 0.5, 2.0, 0]


def test_the_log_is_clamped_before_exp() -> None:
    """At 20: by token each, by sequence the sum, so that 30 and -25 make e^5."""
    log_ratios = from_rows([[30.0, -25.0], [40.0, 40.0]], np.float64)
    by_token = [math.exp(x) for x in (20, -20, 20, 20)]
    assert LEVELS["token"](log_ratios) == pytest.approx(by_token)
    assert LEVELS["sequence"](log_ratios) == pytest.approx([math.exp(5)] * 2 + [math.exp(20)] * 2)


def test_metrics_are_of_the_loss_tokens_of_the_rows() -> None:
    """Loss tokens of row 0: ratios 4 and 1, truncated to 1.5 and 1: mean 1.25, half of them truncated, largest 4.

    Both rows, with .25 and .125 besides: (1.5 + 1 + .25 + .125) / 4 = .71875, a quarter. Row 1 alone, masked outside
    [.2, 2]: .25 and 0.
    """
    loss = from_rows([[0, 1, 0, 1], [0, 1, 1]], bool)
    truncated = weigh("truncate", "token", cap=1.5)
    names = ("correction/mean", "correction/truncated", "correction/raw/max")
    assert truncated.metrics(loss, np.array([0])) == dict(zip(names, map(pytest.approx, (1.25, 0.5, 4)), strict=True))
    found = truncated.metrics(loss, np.array([1, 0]))
    assert found == dict(zip(names, map(pytest.approx, (0.71875, 0.25, 4)), strict=True))
    masked = weigh("mask", "token", low=0.2, high=2).metrics(loss, np.array([1]))
    assert masked["correction/masked"] == 0.5 and masked["correction/mean"] == pytest.approx(0.125)
    assert truncated.metrics(from_rows([[0, 0, 0, 0], [0, 1, 1]], bool), np.array([0])) == {}


def test_equal_policies_have_weight_one() -> None:
    """Exactly, whatever the correction: so that it changes nothing where there is nothing to correct."""
    for kind in CORRECTIONS:
        for level in LEVELS:
            found = correct(ENGINE, ENGINE, ACTIONS, CorrectionOptions(kind, level))
            assert found.weights.values[ACTIONS.values].tolist() == [1.0] * 5
            assert (
                found.metrics(ACTIONS, np.arange(2))[f"correction/{'truncated' if kind == 'truncate' else 'masked'}"]
                == 0
            )


def test_options_are_those_of_the_config() -> None:
    """Config imports no torch and lists the names itself."""
    assert CorrectionOptions(**CorrectionConfig(kind="mask", low=0.3).semantic()) == CorrectionOptions(
        "mask", "token", cap=2.0, low=0.3, high=2.0
    )
    for field, names in (("kind", {"none", *CORRECTIONS}), ("level", set(LEVELS))):
        assert set(CorrectionConfig.model_fields[field].annotation.__args__) == names
