"""Whitening and means over masks; expected values worked by hand."""

import numpy as np
from numpy.testing import assert_allclose

from ops.masked import row_means, spread, whiten
from ops.ragged import from_rows


def test_whiten():
    # 1 2 3: mean 2, population std sqrt(2/3) = .8164966 -> -1.2247449 0 1.2247449; the others are not read
    values = np.array([1, np.nan, 2, 1e9, 3], np.float32)
    white = whiten(values, np.array([True, False, True, False, True]), eps=0.0)
    assert white.dtype == np.float32
    assert_allclose(white, [-1.2247449, 0, 0, 0, 1.2247449], atol=1e-6)


def test_whiten_divides_by_std_plus_eps():
    # 0 2: mean 1, std 1; eps 1 -> -.5 .5
    assert_allclose(whiten(np.array([0.0, 2.0]), np.ones(2, bool), eps=1.0), [-0.5, 0.5])


def test_c13_whitening_zero_or_one_token():
    assert whiten(np.array([5.0, np.nan]), np.zeros(2, bool)).tolist() == [0, 0]
    assert whiten(np.array([5.0, np.nan]), np.array([True, False])).tolist() == [0, 0]
    assert whiten(np.zeros(0), np.zeros(0, bool)).tolist() == []


def test_c10_whitening_equal_tokens_gives_exactly_zero():
    # The float mean of 3 x .1 is not .1: (x - mean) / std would be -1 for all of them.
    assert np.mean([0.1] * 3) != 0.1
    assert whiten(np.full(3, 0.1), np.ones(3, bool), eps=0.0).tolist() == [0.0] * 3


def test_row_means():
    means = row_means(from_rows([[1, np.nan, 3], [7], []], np.float32), from_rows([[1, 0, 1], [0], []], bool))
    assert means.tolist() == [2, 0, 0]


def test_spread(masks):
    assert spread(np.array([0.5, -1, 2]), masks("011", "10", "")).to_pylist() == [[0, 0.5, 0.5], [-1, 0], []]
