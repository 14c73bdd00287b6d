"""How far the engine's log-probs are from the trainer's, at the tokens that the engine sampled.

d = log pi_train - log pi_engine, of one and the same distribution: the full softmax at the sampling temperature. With
exact arithmetic on both sides and the same weights, d is 0.
"""

import math
from collections.abc import Sequence

import numpy as np

from ops.importance import ratio
from ops.metrics import describe
from ops.ragged import Ragged

# Where |d| is cut: 1, 2, 5 in every decade, nats. See `histogram`.
EDGES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
FAR = (0.1, 1.0)  # nats, whose excess is counted


def deltas(old_logprobs: Ragged, rollout_logprobs: Ragged, action_mask: Ragged) -> np.ndarray:
    """[actions] float64, d of each action token, nats. Columns: float32 log-probs, bool."""
    sampled = action_mask.values
    return old_logprobs.values[sampled].astype(np.float64) - rollout_logprobs.values[sampled]


def mismatch_metrics(apart: np.ndarray) -> dict[str, float]:
    """Of `deltas`: |d| mean, max and shares beyond FAR; ratio e^d min, max; k3, the estimate of KL(engine || trainer).

    The tokens were drawn from the engine, so that k3 of a token is e^d - 1 - d. {} for no tokens. Source: math.md 5.
    """
    if not len(apart):
        return {}
    gap = np.abs(apart)
    metrics = describe("engine_logprob_gap", gap, "mean", "max")
    metrics |= {f"engine_logprob_gap/above_{limit:g}": float(np.mean(gap > limit)) for limit in FAR}
    return metrics | describe("engine_ratio", ratio(apart), "min", "max") | {"engine_kl/k3": _k3(apart)}


def _k3(apart: np.ndarray) -> float:
    import torch  # here, since the driver imports this module and has no use for torch

    from ops.kl import k3

    trainer = torch.from_numpy(apart)
    return float(k3(torch.zeros_like(trainer), trainer).mean())


def histogram(apart: np.ndarray) -> np.ndarray:
    """[2 len(EDGES) + 1] int64: how many d lie in each bin, from the most negative to the most positive.

    Bins are alike on both sides: the middle one has |d| < EDGES[0], the k-th beside it (from 1)
    EDGES[k - 1] <= |d| < EDGES[k], the outermost all |d| >= EDGES[-1].
    """
    side = np.searchsorted(np.array(EDGES), np.abs(apart), side="right")
    bins = np.where(apart < 0, -side, side) + len(EDGES)
    return np.bincount(bins, minlength=2 * len(EDGES) + 1)


def decades(edges: Sequence[float]) -> dict[int, float]:
    """Where the powers of ten stand: the number of bins before it -> the signed value.

    edges: as EDGES, ascending. Without the two innermost, which crowd around 0 in a plot.
    """
    signed = [*(-edge for edge in reversed(edges)), *edges]
    powers = {i + 1: value for i, value in enumerate(signed) if math.log10(abs(value)).is_integer()}
    return {place: value for place, value in powers.items() if abs(value) > edges[0]}
