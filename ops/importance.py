"""Importance weights pi_train / pi_engine: what makes up for rollouts of an engine that is not quite the trainer.

Source: math.md 5, "Off-policy correction". Truncated importance sampling: Ionides 2008; IMPALA 1802.01561.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ops.metrics import describe
from ops.ragged import Ragged, row_sums

# Beyond e^20 a float32 ratio says nothing more, and exp or its gradient may overflow: the log-ratio is clamped there.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class CorrectionOptions:
    """Which weights, and what is done with those far from 1."""

    kind: str  # of CORRECTIONS
    level: str  # of LEVELS
    cap: float = 2.0  # C of truncate
    low: float = 0.5  # of mask, as `high`
    high: float = 2.0


def truncate(weights: np.ndarray, options: CorrectionOptions) -> np.ndarray:
    """min(w, C): a token that the engine made too rare teaches at most C times. [tokens] float64."""
    return np.minimum(weights, options.cap)


def mask(weights: np.ndarray, options: CorrectionOptions) -> np.ndarray:
    """w inside [low, high], both included; 0 outside: such a token teaches nothing. [tokens] float64."""
    return np.where((weights >= options.low) & (weights <= options.high), weights, 0.0)


def ratio(log_ratio: np.ndarray) -> np.ndarray:
    """e^x, with x clamped to +-MAX_LOG_RATIO. Any shape, float64."""
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def token_ratios(log_ratios: Ragged) -> np.ndarray:
    """w_t = e^(d_t) of each token by itself. [tokens] float64."""
    return ratio(log_ratios.values)


def sequence_ratios(log_ratios: Ragged) -> np.ndarray:
    """w = e^(sum of d_t): the product over the trajectory's action tokens, the same at each. [tokens] float64."""
    return np.repeat(ratio(row_sums(log_ratios)), log_ratios.lengths)


CORRECTIONS: dict[str, Callable[[np.ndarray, CorrectionOptions], np.ndarray]] = {"truncate": truncate, "mask": mask}
LEVELS: dict[str, Callable[[Ragged], np.ndarray]] = {"token": token_ratios, "sequence": sequence_ratios}
_TOUCHED = {"truncate": "truncated", "mask": "masked"}


@dataclass(frozen=True)
class Corrected:
    """Weights of all tokens, full stream length; 0 where the token is no action."""

    raw: Ragged  # float64
    weights: Ragged  # float32, after the correction
    kind: str  # of CORRECTIONS

    def metrics(self, loss_mask: Ragged, rows: np.ndarray) -> dict[str, float]:
        """Of the loss tokens of some rows: mean weight, share that the correction changed, largest weight before it."""
        kept = loss_mask.take(rows).values
        raw, weights = (column.take(rows).values[kept] for column in (self.raw, self.weights))
        if not len(raw):
            return {}
        changed = float(np.mean(weights != raw.astype(np.float32)))
        return {
            **describe("correction", weights, "mean"),
            f"correction/{_TOUCHED[self.kind]}": changed,
            **describe("correction/raw", raw, "max"),
        }


def correct(
    old_logprobs: Ragged, rollout_logprobs: Ragged, action_mask: Ragged, options: CorrectionOptions
) -> Corrected:
    """Weights w = e^d, d = old_logprobs - rollout_logprobs, by token or by sequence, then truncated or masked.

    By sequence d is summed over the trajectory's action tokens, and the sum is clamped. old_logprobs (of the trainer
    before its update) and rollout_logprobs (of the engine): float32, nats, of one and the same distribution: the full
    softmax at the sampling temperature; what stands at other than action tokens is not read.
    Raises KeyError for an unknown kind or level.
    """
    apart = old_logprobs.values.astype(np.float64) - rollout_logprobs.values
    log_ratios = action_mask.like(np.where(action_mask.values, apart, 0.0))
    raw = np.where(action_mask.values, LEVELS[options.level](log_ratios), 0.0)
    weights = np.where(action_mask.values, CORRECTIONS[options.kind](raw, options), 0.0)
    return Corrected(action_mask.like(raw), action_mask.like(weights.astype(np.float32)), options.kind)
