"""A part of the trained model (policy, critic trunk, value head) with its gradient buffer and its own optimizer."""

from collections.abc import Sequence

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule

from data.config import OptimizerConfig
from models.megatron.schedule import learning_rate


class Part:
    """Parameters that always step together: one DDP module, one distributed optimizer, one step counter."""

    def __init__(self, module: MegatronModule, dtype: torch.dtype) -> None:
        """dtype: of the module's parameters; 16-bit ones get float32 masters."""
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.module = DistributedDataParallel(module.config, buffers, module)
        self.optimizer = _optimizer(self.module, dtype)
        self.steps = 0
        self.reset_optimizer()

    @property
    def bare(self) -> MegatronModule:
        return self.module.module

    def reset_optimizer(self) -> None:
        """As new: masters equal to the weights, moments and step counters 0.

        The moments are made here, not by the first step, so that a fresh part can be saved and loaded into. A rank
        that owns no element of a small part gets a state that belongs to none: Megatron asks each rank for its step.
        """
        self.optimizer.reload_model_params()
        self.steps = 0
        if not any(group["params"] for group in self.optimizer.param_groups):
            self.optimizer.state["no parameter"] = {"step": torch.zeros(())}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = torch.zeros_like(param, dtype=torch.float32)

    def zero_gradients(self) -> None:
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, rate: float, config: OptimizerConfig) -> float:
        """One AdamW step on gradients that `clip` prepared; returns the learning rate it took."""
        lr = learning_rate(rate, self.steps, config)
        for group in self.optimizer.param_groups:
            # Everything, every time: groups restored from a checkpoint carry the values of that run.
            group["lr"], group["betas"], group["eps"] = lr, tuple(config.betas), config.eps
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        return lr


def clip(parts: Sequence[Part], max_norm: float) -> float:
    """Scales the parts' gradients to a joint norm of at most `max_norm`; returns the norm before.

    Gradients of a norm that is not finite are left as they are: the caller must not step.
    """
    for part in parts:
        part.optimizer.prepare_grads()
    gradients = [g for part in parts for g in part.optimizer.get_grads_for_grad_norm()]
    norm = float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=_group(parts)))
    if norm < float("inf"):  # false for NaN
        for part in parts:
            clip_grad_by_total_norm_fp32(part.optimizer.get_parameters(), max_norm, norm)
    return norm


def _group(parts: Sequence[Part]) -> torch.distributed.ProcessGroup:
    return parts[0].optimizer.get_grad_stats_parallel_group()


def _optimizer(module: DistributedDataParallel, dtype: torch.dtype) -> DistributedOptimizer:
    """AdamW. Rates are set at each step, so that they are no part of what a checkpoint must match."""
    config = megatron_optimizer.OptimizerConfig(
        optimizer="adam",
        lr=1.0,
        min_lr=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    (optimizer,) = megatron_optimizer.get_megatron_optimizer(config, [module]).chained_optimizers
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer
