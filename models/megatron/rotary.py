"""Rotary position embedding for packed tokens: cosines and sines once per micro-batch, one pass per projection.

Megatron's own packed path loops over the sequences in Python and recomputes the cosines in every layer.
"""

import math

import torch

from models.megatron.shape import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, radians per token: theta^(-2i / head_dim), bit for bit as transformers computes them.

    Llama 3's scaling divides the frequencies of long wavelengths by `factor`, keeps the short ones, and interpolates
    between (arXiv 2407.21783; transformers: rope_type "llama3").
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.factor == 1.0:
        return frequencies
    turns = rope.original_context * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


class Rotate(torch.autograd.Function):
    """Turns the halves (a, b) of each head by its token's angle: (a cos − b sin, b cos + a sin) (arXiv 2104.09864).

    x [tokens, heads, head_dim]; cos, sin [tokens, 1, head_dim / 2] in x's dtype.
    """

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None  # the transpose of a rotation is the rotation back


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation, in x's dtype; on a GPU one kernel in float32."""
    if x.is_cuda:
        from models.megatron import kernels

        return kernels.turn(x, cos, sin)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
