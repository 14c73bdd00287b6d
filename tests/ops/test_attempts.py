"""avg@k, pass@j and their standard errors, by hand and against a count of all draws."""

import itertools
import math

import numpy as np
import pytest

from ops.attempts import attempt_metrics, pass_at, tries

NAN = math.nan
# Seven problems of three answers each, of which 0, 1, 1, 2, 3, 0, 3 pass; together 10 of 21.
SEVEN = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]]


def metrics(rows: list[list[float]], passing: float = 1.0) -> dict[str, float]:
    rewards = np.array(rows, float)
    problems = np.repeat(np.arange(len(rows)), rewards.shape[1])
    return attempt_metrics(rewards.ravel(), problems, rewards.shape[1], passing)


def test_seven_problems_of_three_answers() -> None:
    """avg@3 = 10/21. pass@1 is the same. Of two answers, where one of three passes: 1 - C(2,2)/C(3,2) = 2/3, where two
    or three do: 1; pass@2 = (0 + 2/3 + 2/3 + 1 + 1 + 0 + 1)/7 = 13/21. pass@3: five of seven have one that passes.

    Means by problem in thirds 0 1 1 2 3 0 3, mean 10/7: squares sum to 24, 24 - 7 (10/7)^2 = 68/7, variance 68/42 in
    ninths, so se = sqrt(68/42/9/7). pass@3: variance 5/7 (1 - 5/7) 7/6 = 5/21, se = sqrt(5/21/7). pass@2, in thirds
    0 2 2 3 3 0 3, mean 13/7: 35 - 7 (13/7)^2 = 76/7, variance 76/42, se = sqrt(76/42/9/7).
    """
    assert metrics(SEVEN) == pytest.approx(
        {
            "problems": 7,
            "avg@3": 10 / 21,
            "avg@3/se": math.sqrt(68 / 42 / 9 / 7),
            "pass@1": 10 / 21,
            "pass@1/se": math.sqrt(68 / 42 / 9 / 7),
            "pass@2": 13 / 21,
            "pass@2/se": math.sqrt(76 / 42 / 9 / 7),
            "pass@3": 5 / 7,
            "pass@3/se": math.sqrt(5 / 21 / 7),
        }
    )


def test_the_order_of_rows_does_not_matter() -> None:
    order = np.random.default_rng(0).permutation(21)
    shuffled = attempt_metrics(np.array(SEVEN, float).ravel()[order], np.repeat(np.arange(7), 3)[order], 3, 1.0)
    assert shuffled == pytest.approx(metrics(SEVEN), abs=1e-15)


def test_a_failed_answer_is_no_wrong_one() -> None:
    """Three problems: (1, failed), (0, 1), all failed. avg: (1 + 1/2)/2. pass@1: of the answers there are, the same.

    pass@2 takes two answers that were scored: the second problem has them, and one passes; one problem has no error.
    Were a failed answer a wrong one, avg would be (1/2 + 1/2 + 0)/3.
    """
    found = metrics([[1, NAN], [0, 1], [NAN, NAN]])
    assert found == pytest.approx(
        {"problems": 3, "avg@2": 0.75, "avg@2/se": 0.25, "pass@1": 0.75, "pass@1/se": 0.25, "pass@2": 1.0}
    )
    assert metrics([[NAN]]) == {"problems": 1}


def test_passing_is_a_reward() -> None:
    """Rewards .5 and .2 of one problem, .5 and .5 of another: at .5 the chances are 1/2 and 1; at 1 nothing passes."""
    found = metrics([[0.5, 0.2], [0.5, 0.5]], passing=0.5)
    assert (found["pass@1"], found["pass@2"], found["avg@2"]) == (0.75, 1.0, pytest.approx(0.425))
    assert metrics([[0.5, 0.2], [0.5, 0.5]])["pass@2"] == 0.0


def test_pass_at_counts_all_draws() -> None:
    """Of n = 6 answers, c pass: the share of all draws of j that have one of them. By hand, 1 - C(4,3)/C(6,3) = 4/5."""
    assert pass_at(3, np.array([6]), np.array([2])) == pytest.approx([0.8])
    for j, c in itertools.product(range(1, 7), range(7)):
        draws = list(itertools.combinations([True] * c + [False] * (6 - c), j))
        assert pass_at(j, np.array([6]), np.array([c])) == pytest.approx([sum(map(any, draws)) / len(draws)])


def test_which_passes_are_told() -> None:
    assert [tries(k) for k in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_a_missing_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="problem 1: 1 answers, and 2 were asked for"):
        attempt_metrics(np.ones(3), np.array([0, 0, 1]), 2, 1.0)
