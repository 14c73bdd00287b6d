"""The output layer as what is read from it: log-probs and entropies, on a GPU without holding the logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch.distributed import ProcessGroup, ReduceOp

from models.megatron.logprob import logprob_and_entropy, reduced

CHUNK = 4096  # tokens whose logits exist at a time


@dataclass(frozen=True)
class Head:
    """Of the last stage. weight: [vocabulary / ranks of `group`, hidden], maybe the embedding."""

    layer: ColumnParallelLinear
    weight: torch.Tensor
    group: ProcessGroup

    def logprob_and_entropy(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logprob.logprob_and_entropy of the logits of hidden [tokens, hidden]."""
        if in_chunks(hidden):
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
            return Chunked.apply(hidden, self.weight, targets, temperature, self.group)
        logits = self.layer(hidden[:, None], weight=self.weight)[0][:, 0]
        return logprob_and_entropy(logits, targets, temperature, self.group)


def in_chunks(hidden: torch.Tensor) -> bool:
    """The kernels are a GPU's; on a CPU logits are kept, so that recorded runs give the same bits."""
    return hidden.is_cuda


class Chunked(torch.autograd.Function):
    """logprob_and_entropy(hidden · weightᵀ). The logits of CHUNK tokens at a time, made anew by the backward pass.

    The weight's gradient adds up in float32 over the chunks. One MAX and one SUM over `group`.
    """

    @staticmethod
    def forward(
        ctx: object,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from models.megatron import kernels

        ctx.set_materialize_grads(False)
        local = targets - group.rank() * len(weight)
        found = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        for part in _parts(len(hidden)):
            kernels.statistics(hidden[part] @ weight.t(), local[part], temperature, found[:, part])
        here, total, weighted, hit = found
        peak = reduced(here.clone(), ReduceOp.MAX, group)
        shift = (here - peak) / temperature
        hit = ((hit - peak) / temperature).masked_fill((local < 0) | (local >= len(weight)), 0.0)
        sums = torch.stack([total * shift.exp(), (weighted + total * shift) * shift.exp(), hit])
        total, weighted, hit = reduced(sums, ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, local, peak, log_total, entropy)
        ctx.temperature = temperature
        return hit - log_total, entropy

    @staticmethod
    def backward(
        ctx: object, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        from models.megatron import kernels

        hidden, weight, local, peak, log_total, entropy = ctx.saved_tensors
        grads = torch.stack([torch.zeros_like(peak) if g is None else g for g in (grad_logprob, grad_entropy)])
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(len(hidden)):
            logits = hidden[part] @ weight.t()
            rows = (peak[part], log_total[part], entropy[part], grads[:, part])
            kernels.to_gradient(logits, local[part], ctx.temperature, *rows)
            torch.mm(logits, weight, out=of_hidden[part])
            of_weight += logits.t() @ hidden[part]
        return of_hidden, of_weight.to(weight.dtype), None, None, None


def _parts(total: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, total)) for start in range(0, total, CHUNK))
