"""Context parallelism at the output: what is read at a token is computed where the token is, and then known everywhere.

The losses are then computed on every context rank from the same numbers; each rank's gradients are those of its tokens.
"""

import torch
from megatron.core import parallel_state

from models.megatron.batch import PackedBatch


def here(batch: PackedBatch, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Which of the packed indices `at` this rank has: its indices of them, and their numbers in `at` (None: all)."""
    if batch.split is None:
        return at, None
    local = batch.split.local.index_select(0, at)
    which = torch.nonzero(local >= 0)[:, 0]
    return local.index_select(0, which), which


def joined(values: torch.Tensor, which: torch.Tensor | None, total: int) -> torch.Tensor:
    """[total] from each context rank's `values` at its indices `which`, on all of them. which None: nothing to join."""
    return values if which is None else _Join.apply(values, which, total)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: torch.Tensor, which: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(which)
        everywhere = values.new_zeros(total).index_copy_(0, which, values)
        torch.distributed.all_reduce(everywhere, group=parallel_state.get_context_parallel_group())
        return everywhere

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
