"""Policy and value losses per token, and their aggregation over an optimizer step, as torch functions."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ops.importance import MAX_LOG_RATIO
from ops.ragged import Ragged, row_sums

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")


@dataclass(frozen=True)
class LossOptions:
    """How far the ratio may move from 1 before a token stops to teach."""

    clip_low: float = 0.2  # below 1
    clip_high: float = 0.2  # above 1
    dual_clip: float | None = None  # c > 1: for A < 0 the loss is at most -c A


PolicyLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LossOptions], torch.Tensor]


def ppo_clip(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(logprobs - old_logprobs); for A < 0 at most -A c if dual.

    All [tokens] float32, the result too; unmasked (see `aggregate`).
    Source: PPO 1707.06347; unequal clips DAPO 2503.14476; dual clip 1912.09729.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if options.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * options.dual_clip), loss)


def reinforce(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    """-A log pi, on policy: `old_logprobs` and `options` are not used. All [tokens] float32; unmasked."""
    return -advantages * logprobs


POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": ppo_clip, "reinforce": reinforce}


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None = 0.2
) -> torch.Tensor:
    """1/2 max((V - R)^2, (V_c - R)^2), V_c = V_old + clip(V - V_old, -clip, clip); clip None: 1/2 (V - R)^2.

    All [tokens] float32, the result too; unmasked. Source: math.md 5.
    """
    error = (values - returns) ** 2
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return 0.5 * error


def aggregate(
    per_token: torch.Tensor, loss_mask: torch.Tensor, offsets: torch.Tensor, mode: str, horizon: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(numerator, denominator) of some trajectories: summed over all micro-batches of a step, their ratio is the loss.

        token_mean             sum of m l                                  / tokens with m
        seq_mean_token_mean    sum over trajectories of (mean over m of l) / trajectories
        seq_mean_token_sum     sum of m l, over horizon                    / trajectories     (Dr.GRPO 2503.20783)

    So a micro-batch's loss is numerator / `step_denominator`, which is known before the first one, and the gradient
    does not depend on how the step is split. A trajectory without a masked-in token counts and contributes 0: leave
    excluded (failed) trajectories and padding out before. What stands at masked-out tokens does not enter the result,
    be it NaN.

    per_token [tokens] float32; loss_mask [tokens] bool; offsets [trajectories + 1] int, offsets[0] = 0. Both results
    are float64 scalar tensors, the denominator without gradient. Raises ValueError for an unknown mode, or
    seq_mean_token_sum without a horizon of at least 1. Source: math.md 5.
    """
    check_mode(mode)
    kept = torch.where(loss_mask, per_token, torch.zeros((), dtype=per_token.dtype, device=per_token.device))
    if mode == "seq_mean_token_mean":
        kept = kept / _masked_in_row(loss_mask, offsets)
    if mode == "seq_mean_token_sum":
        kept = kept / _check_horizon(horizon)
    count = loss_mask.sum() if mode == "token_mean" else torch.full((), len(offsets) - 1, device=loss_mask.device)
    return kept.sum(dtype=torch.float64), count.to(torch.float64)


def _masked_in_row(loss_mask: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[tokens] for each token, the masked-in tokens of its row, at least 1."""
    before = torch.zeros(len(loss_mask) + 1, dtype=torch.int64, device=loss_mask.device)
    torch.cumsum(loss_mask, 0, out=before[1:])
    offsets = offsets.to(device=loss_mask.device, dtype=torch.int64)
    counts = (before[offsets[1:]] - before[offsets[:-1]]).clamp(min=1)
    return torch.repeat_interleave(counts, offsets.diff(), output_size=len(loss_mask))


def step_denominator(loss_mask: Ragged, rows: np.ndarray, mode: str) -> float:
    """What `aggregate`'s numerators of one optimizer step are divided by: its denominators' sum, from masks alone.

    loss_mask: bool, all trajectories; rows: the numbers of those in the step, over all its micro-batches and ranks. At
    least 1, so that a step with nothing to learn from has loss 0. Raises ValueError for an unknown mode.
    """
    check_mode(mode)
    count = row_sums(loss_mask)[rows].sum() if mode == "token_mean" else len(rows)
    return float(max(count, 1))


def check_mode(mode: str) -> None:
    """Raises ValueError for an aggregation that is not in AGGREGATIONS."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation {mode!r}: it must be one of {', '.join(AGGREGATIONS)}")


def _check_horizon(horizon: int | None) -> int:
    if horizon is None or horizon < 1:
        raise ValueError(f"horizon {horizon}: seq_mean_token_sum divides by it, so it must be at least 1")
    return horizon
