"""The loss of one micro-batch, as a numerator and a count to be summed over an optimizer step, and its metrics."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from models.megatron import ranks
from models.megatron.contract import NonFiniteLoss
from models.megatron.micro import Lesson
from models.megatron.networks import Outputs
from ops.importance import MAX_LOG_RATIO
from ops.kl import k2, k3
from ops.losses import aggregate, value_loss

# (logprobs, old_logprobs, advantages) -> loss, all [tokens] float32
TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Scalars = dict[str, torch.Tensor]  # float64; over micro-batches `/min` and `/max` reduce by name, all others add up


@dataclass(frozen=True)
class Objective:
    """policy + value_weight · value − entropy_bonus · entropy, each aggregated over the optimizer step by `mode`.

    A lesson's weights multiply the policy's loss of each token, and nothing else; what they are divided by stays.
    The value loss is of the lesson's valued tokens alone, and aggregated over them.
    A frozen policy needs no mention: no gradient leads to its terms, and they are only measured.
    """

    token_loss: TokenLoss | None  # None: no policy on this trunk (a separate critic)
    mode: str
    horizon: int
    entropy_bonus: float = 0.0
    value_weight: float | None = None  # None: no value head on this trunk
    value_clip: float | None = None
    clip_low: float = math.inf  # the clip fractions count ratios below 1 - low and above 1 + high
    clip_high: float = math.inf


@dataclass(frozen=True)
class Measured:
    """What one micro-batch adds to an optimizer step's metrics."""

    lesson: Lesson
    scalars: Scalars
    losses: tuple[torch.Tensor, ...]  # [tokens] each, to find the rows of one that is not finite
    logprobs: torch.Tensor | None = None  # [tokens], None of a separate critic


def grade(
    outputs: Outputs, lesson: Lesson, objective: Objective, non_loss_data: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Measured] | Measured:
    """(numerator of the loss, count that divides it, metrics); for `non_loss_data` the metrics alone.

    Context ranks compute one and the same loss, and Megatron adds their counts up: only the first one counts.
    """
    terms, scalars = _terms(outputs, lesson, objective)
    weights = {
        "loss/policy": 1.0,
        "loss/value": objective.value_weight,
        "loss/negative_entropy": objective.entropy_bonus,
    }
    learned = torch.zeros((), dtype=torch.float64, device=lesson.advantages.device)
    everywhere = torch.ones_like(lesson.advantages, dtype=torch.bool)
    _, count = aggregate(lesson.advantages, everywhere, lesson.offsets, objective.mode, objective.horizon)
    scalars["count"] = count
    for name, per_token in terms.items():
        among, scale = (_valued(lesson), lesson.value_scale) if name == "loss/value" else (everywhere, 1.0)
        numerator, _ = aggregate(per_token, among, lesson.offsets, objective.mode, objective.horizon)
        numerator = scale * numerator
        learned = learned + weights[name] * numerator
        scalars[name] = numerator.detach()
    logprobs = _loss_tokens(outputs.logprobs.detach(), lesson) if objective.token_loss is not None else None
    measured = Measured(lesson, scalars, tuple(per_token.detach() for per_token in terms.values()), logprobs)
    if non_loss_data:
        return measured
    counts = parallel_state.get_context_parallel_rank() == 0
    return learned, (count if counts else torch.zeros_like(count)).to(torch.int32), measured


def step_metrics(parts: Sequence[Measured], step: int) -> dict[str, float]:
    """Metrics of one optimizer step from its micro-batches: means over loss tokens, losses over the step's count.

    parts: this rank's; the metrics are of all ranks' and the same on each. Raises NonFiniteLoss on every rank, naming
    the rows, if a loss is NaN or infinite anywhere.
    """
    totals = _totals(ranks.from_speakers(_to_host([part.scalars for part in parts])))
    if not all(math.isfinite(totals.get(name, 0.0)) for name in ("loss/policy", "loss/value", "loss/negative_entropy")):
        sick = ranks.from_speakers([row for part in parts for row in _sick_rows(part)])
        raise NonFiniteLoss(step, sorted(set(sick)), "the loss is not finite")
    tokens, count = totals.pop("tokens"), max(totals.pop("count"), 1.0)
    per = {"loss": count, "value": max(totals.pop("valued", 0.0), 1.0)}  # by first word; else tokens
    totals.pop("loss/negative_entropy", None)
    metrics = {"train/tokens": tokens}
    for name, value in totals.items():
        if name.endswith(("/min", "/max")):
            metrics[name] = value if tokens else 1.0
        else:
            metrics[name] = value / per.get(name.partition("/")[0], max(tokens, 1.0))
    if "ratio/mean" in metrics:
        variance = metrics.pop("ratio/square") - metrics["ratio/mean"] ** 2
        metrics["ratio/std"] = math.sqrt(max(variance, 0.0))
    return metrics


def _terms(outputs: Outputs, lesson: Lesson, objective: Objective) -> tuple[dict[str, torch.Tensor], Scalars]:
    """Losses per token [tokens] by name, and scalars for the metrics."""
    terms: dict[str, torch.Tensor] = {}
    scalars = {"tokens": _number(len(lesson.rows), lesson.advantages.device)}
    if objective.token_loss is not None:
        logprobs, entropy = (_loss_tokens(x, lesson) for x in (outputs.logprobs, outputs.entropy))
        loss = objective.token_loss(logprobs, lesson.old_logprobs, lesson.advantages)
        terms["loss/policy"] = loss if lesson.weights is None else lesson.weights * loss
        if objective.entropy_bonus:
            terms["loss/negative_entropy"] = -entropy
        scalars |= _policy_scalars(logprobs.detach(), entropy.detach(), lesson, objective)
    if objective.value_weight is not None:
        read_at = lesson.micro.reads.at.index_select(0, lesson.among_actions)
        values = outputs.values.index_select(0, read_at)
        terms["loss/value"] = value_loss(values, lesson.old_values, lesson.returns, objective.value_clip)
        moved = (values.detach() - lesson.old_values).abs()
        valued = _valued(lesson)
        scalars["value/clip_fraction"] = _count(valued & (moved > (objective.value_clip or math.inf)))
        scalars["valued"] = _count(valued)
    return terms, scalars


def _valued(lesson: Lesson) -> torch.Tensor:
    """[tokens] bool"""
    return torch.ones_like(lesson.advantages, dtype=torch.bool) if lesson.valued is None else lesson.valued


def _loss_tokens(per_action: torch.Tensor, lesson: Lesson) -> torch.Tensor:
    return per_action.index_select(0, lesson.among_actions)


def _policy_scalars(logprobs: torch.Tensor, entropy: torch.Tensor, lesson: Lesson, objective: Objective) -> Scalars:
    old = lesson.old_logprobs
    ratio = torch.exp((logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).double()
    infinity = ratio.new_full((1,), math.inf)  # so that a micro-batch without loss tokens has no say
    return {
        "entropy": entropy.sum(dtype=torch.float64),
        "ratio/mean": ratio.sum(),
        "ratio/square": ratio.square().sum(),
        "ratio/min": torch.cat([ratio, infinity]).min(),
        "ratio/max": torch.cat([ratio, -infinity]).max(),
        "clip_fraction/low": _count(ratio < 1.0 - objective.clip_low),
        "clip_fraction/high": _count(ratio > 1.0 + objective.clip_high),
        # The tokens were sampled from the old policy: these estimate KL(old || new).
        "kl/k2": k2(old, logprobs).sum(dtype=torch.float64),
        "kl/k3": k3(old, logprobs).sum(dtype=torch.float64),
    }


def _to_host(scalars: Sequence[Scalars]) -> list[dict[str, float]]:
    """One copy for all micro-batches and names."""
    if not scalars:
        return []
    names = list(scalars[0])
    rows = torch.stack([torch.stack([row[name] for name in names]) for row in scalars]).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def _totals(scalars: Sequence[dict[str, float]]) -> dict[str, float]:
    reduce = {"/min": min, "/max": max}
    return {name: reduce.get(name[-4:], math.fsum)([row[name] for row in scalars]) for name in scalars[0]}


def _sick_rows(part: Measured) -> set[int]:
    sick = torch.stack([~torch.isfinite(loss) for loss in part.losses]).any(0)
    return {int(row) for row in part.lesson.rows[sick.cpu().numpy()]}


def _count(where: torch.Tensor) -> torch.Tensor:
    return where.sum(dtype=torch.float64)


def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), float(value), dtype=torch.float64, device=device)  # unlike tensor(), no wait for a GPU
