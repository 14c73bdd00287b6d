"""Log-probability of one token and entropy of the whole distribution, from logits that may be split over ranks."""

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


def logprob_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] and the entropy (nats) of that softmax, both [tokens] float32.

    logits: [tokens, vocabulary / ranks of `group`], any float dtype, left as they are; targets: [tokens] int64, ids of
    the full vocabulary. All is computed in float32; both outputs are differentiable. One MAX and one SUM over `group`.
    """
    return _LogProbAndEntropy.apply(logits, targets, temperature, group)


class _LogProbAndEntropy(torch.autograd.Function):
    """With p = softmax(z), z = logits / T: d log p_t / dz = 1_t − p and dH / dz = −p (log p + H)."""

    @staticmethod
    def forward(
        ctx: object, logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        logits32 = logits.float()
        peak = reduced(logits32.amax(-1), ReduceOp.MAX, group)
        z = (logits32 - peak[:, None]).div_(temperature)
        local, outside = _own_part(targets, z.size(-1), group)
        hit = z.gather(-1, local[:, None])[:, 0].masked_fill(outside, 0.0)
        weight = z.exp()
        sums = torch.stack([weight.sum(-1), weight.mul_(z).sum(-1), hit])
        total, weighted, hit = reduced(sums, ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(z.sub_(log_total[:, None]), local, outside, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return hit - log_total, entropy

    @staticmethod
    def backward(
        ctx: object, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        logp, local, outside, entropy = ctx.saved_tensors
        p = logp.exp()
        grad = torch.zeros_like(p) if grad_logprob is None else p * -grad_logprob[:, None]
        if grad_entropy is not None:
            grad -= p.mul_(logp + entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_logprob is not None:
            grad.scatter_add_(-1, local[:, None], grad_logprob.masked_fill(outside, 0.0)[:, None])
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None, None


def _own_part(targets: torch.Tensor, size: int, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids within this rank's part of the vocabulary (0 where elsewhere), and where they are elsewhere."""
    local = targets - group.rank() * size
    outside = (local < 0) | (local >= size)
    return local.masked_fill(outside, 0), outside


def reduced(values: torch.Tensor, op: ReduceOp, group: ProcessGroup) -> torch.Tensor:
    """`values` over all ranks of `group`, in place."""
    if group.size() > 1:
        all_reduce(values, op=op, group=group)
    return values
