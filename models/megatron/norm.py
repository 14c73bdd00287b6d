"""RMSNorm in the model's dtype: torch's on the CPU, one kernel each way on a GPU."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Its weight says whether sequence parallelism must reduce its gradient."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Normalise.apply(x, self.weight, self.eps) if x.is_cuda else super().forward(x)


class Normalise(torch.autograd.Function):
    """x / sqrt(mean x² + eps) · weight over the last dimension, in float32 until the result is rounded."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from models.megatron import kernels

        y, factor = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, factor)
        return y

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        from models.megatron import kernels

        return *kernels.rms_norm_gradients(grad, *ctx.saved_tensors), None
