"""Engine against trainer; expected values worked by hand."""

import math

import numpy as np
import pytest

from ops.mismatch import EDGES, deltas, histogram, mismatch_metrics
from ops.ragged import from_rows

MIDDLE = len(EDGES)


def test_deltas_are_trainer_less_engine_at_sampled_tokens() -> None:
    mask = from_rows([[0, 1, 1], [1]], bool)
    trainer = from_rows([[0, -1.5, -2], [-0.5]], np.float32)
    engine = from_rows([[-9, -1, -2], [-1.5]], np.float32)
    assert deltas(trainer, engine, mask).tolist() == [-0.5, 0.0, 1.0]


def test_metrics() -> None:
    """d = -ln 2, 0, ln 3, ln 4: ratios 1/2 1 3 4, and k3 = e^d - 1 - d of each.

    |d| = .693147 0 1.098612 1.386294, mean .794513; k3 = .193147 + 0 + .901388 + 1.613706, mean .677060.
    The other sign, KL(trainer || engine), would give e^-d - 1 + d = .306853 + 0 + .431946 + .636294, mean .343773.
    Three of four are beyond .1, two beyond 1.
    """
    assert mismatch_metrics(np.log([0.5, 1.0, 3.0, 4.0])) == {
        "engine_logprob_gap/mean": pytest.approx(0.794513, abs=1e-6),
        "engine_logprob_gap/max": pytest.approx(1.386294, abs=1e-6),
        "engine_logprob_gap/above_0.1": 0.75,
        "engine_logprob_gap/above_1": 0.5,
        "engine_ratio/min": pytest.approx(0.5),
        "engine_ratio/max": pytest.approx(4.0),
        "engine_kl/k3": pytest.approx(0.677060, abs=1e-6),
    }


def test_the_mean_of_k3_is_kl_of_engine_to_trainer() -> None:
    """C17. Engine .75 .25, trainer .5 .5; four draws from the engine: three of the first token, one of the second.

    KL(engine || trainer) = .75 ln 1.5 + .25 ln .5 = .130812, and the draws have their expected shares.
    """
    apart = np.log([0.5 / 0.75] * 3 + [0.5 / 0.25])
    assert mismatch_metrics(apart)["engine_kl/k3"] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_a_huge_distance_is_finite_and_no_tokens_measure_nothing() -> None:
    found = mismatch_metrics(np.array([80.0, -80.0]))
    assert found["engine_ratio/max"] == pytest.approx(math.exp(20)) and math.isfinite(found["engine_kl/k3"])
    assert mismatch_metrics(np.zeros(0)) == {}
    assert not histogram(np.zeros(0)).any()


def test_histogram() -> None:
    """Edges 1, 2, 5 a decade from .0001 to 10: .004 lies between .002 and .005, the fifth and sixth of them; 2.7 in
    2 to 5, the 14th and 15th. On an edge a value counts outwards, on either side of 0.
    """
    counts = histogram(np.array([0.0, 5e-5, -5e-5, 0.004, 0.004, 2.7, -2.7, 0.5, -0.5, 10.0, -99.0]))
    assert len(counts) == 2 * 16 + 1 and counts.sum() == 11
    wanted = {0: 3, 5: 2, 14: 1, -14: 1, 12: 1, -12: 1, 16: 1, -16: 1}
    assert {int(i) - MIDDLE: int(counts[i]) for i in np.flatnonzero(counts)} == wanted
    assert (EDGES[4], EDGES[5], EDGES[13], EDGES[14], EDGES[11]) == (0.002, 0.005, 2.0, 5.0, 0.5)


def test_histogram_of_the_negative_is_its_mirror() -> None:
    apart = np.random.default_rng(0).normal(size=1000) * 10.0 ** np.random.default_rng(1).integers(-6, 2, 1000)
    assert (histogram(-apart) == histogram(apart)[::-1]).all()
    assert histogram(apart).sum() == 1000
