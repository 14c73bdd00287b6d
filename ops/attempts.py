"""Several answers to each problem: avg@k, pass@j, and how far to trust them.

A failed answer (its scorer gave no finite reward) is no wrong one: it counts for nothing, neither for nor against.
Problems are what is sampled, so standard errors are over problems: answers to one problem are alike (2411.00640, 2.2).
"""

import numpy as np

from ops.groups import statistics


def attempt_metrics(rewards: np.ndarray, problems: np.ndarray, samples: int, passing: float) -> dict[str, float]:
    """avg@k and pass@j, j = 1, 2, 4, ... and k, each with its standard error as `/se`.

    rewards [rows] float, non-finite: failed; problems [rows] int64 numbers from 0, in any order; k = samples, answers a
    problem; passing: the least reward that passes. A figure without a problem to measure is left out, as is the error
    of one problem. Raises ValueError unless each problem has k answers.
    """
    rows = np.bincount(problems)
    if (rows != samples).any():
        number = int((rows != samples).argmax())
        raise ValueError(f"problem {number}: {rows[number]} answers, and {samples} were asked for; generate them again")
    seen = statistics(rewards, problems)
    passed = np.bincount(problems, np.isfinite(rewards) & (rewards >= passing), len(rows)).astype(np.int64)
    metrics = {"problems": float(len(rows))} | _mean(f"avg@{samples}", seen.mean[seen.finite > 0])
    for j in tries(samples):
        enough = seen.finite >= j
        metrics |= _mean(f"pass@{j}", pass_at(j, seen.finite[enough], passed[enough]))
    return metrics


def pass_at(j: int, scored: np.ndarray, passed: np.ndarray) -> np.ndarray:
    """1 - C(n - c, j) / C(n, j): the chance that of j of a problem's answers one passes, without bias.

    scored n and passed c, [problems] int64, n >= j; the result [problems] float64. Source: 2107.03374, eq. 1.
    """
    taken = np.arange(j)
    missed = (scored - passed)[:, None] - taken  # 0 among them where fewer than j answers miss
    return 1.0 - np.prod(np.maximum(missed, 0) / (scored[:, None] - taken), axis=1)


def tries(samples: int) -> list[int]:
    """5 -> [1, 2, 4, 5]"""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})


def _mean(name: str, values: np.ndarray) -> dict[str, float]:
    """Over problems: the mean, and the unbiased standard deviation over the root of their number."""
    if not len(values):
        return {}
    error = {f"{name}/se": float(np.std(values, ddof=1) / np.sqrt(len(values)))} if len(values) > 1 else {}
    return {name: float(np.mean(values))} | error
