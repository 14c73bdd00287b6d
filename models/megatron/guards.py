"""When training has gone wrong: the policy has moved too far, within one iteration, from the one that sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from models.megatron import ranks
from models.megatron.contract import BeyondLimit
from models.megatron.objective import Measured
from ops.importance import MAX_LOG_RATIO
from ops.kl import k3


@dataclass(frozen=True)
class Limits:
    """None: no limit."""

    max_kl: float | None = None  # nats a token, k3 of KL(old || new), mean over an optimizer step
    max_ratio: float | None = None  # of any token, new / old or old / new


NO_LIMITS = Limits()


def require_within(parts: Sequence[Measured], metrics: dict[str, float], step: int, limits: Limits) -> None:
    """Raises BeyondLimit on every rank, naming the rows from the worst down, if an optimizer step is beyond a limit.

    parts: this rank's; metrics: of all ranks.
    """
    if limits.max_kl is not None and metrics["kl/k3"] > limits.max_kl:
        what = f"kl/k3 is {metrics['kl/k3']:.3g} nats a token, beyond train.max_kl = {limits.max_kl:g},"
        raise BeyondLimit(step, _worst(parts, _mean_k3), what)
    if limits.max_ratio is not None:
        low, high = metrics["ratio/min"], metrics["ratio/max"]
        if high > limits.max_ratio or low * limits.max_ratio < 1.0:
            what = f"ratios from {low:.3g} to {high:.3g} are beyond train.max_ratio = {limits.max_ratio:g}"
            raise BeyondLimit(step, _worst(parts, _largest_move), what)


def _worst(parts: Sequence[Measured], measure: Callable[[torch.Tensor, torch.Tensor], float]) -> list[int]:
    """Rows by `measure(logprobs, old_logprobs)` of their loss tokens, the highest first, ties by row."""
    found = []
    for part in parts:
        assert part.logprobs is not None  # the policy's own parts have them
        for row in sorted(set(part.lesson.rows.tolist())):
            mine = torch.from_numpy(part.lesson.rows == row).to(part.logprobs.device)
            found.append((-measure(part.logprobs[mine], part.lesson.old_logprobs[mine]), row))
    return [row for _, row in sorted(ranks.from_speakers(found))]


def _mean_k3(logprobs: torch.Tensor, old: torch.Tensor) -> float:
    return float(k3(old, logprobs).mean())


def _largest_move(logprobs: torch.Tensor, old: torch.Tensor) -> float:
    return float((logprobs - old).abs().clamp(max=MAX_LOG_RATIO).max())
