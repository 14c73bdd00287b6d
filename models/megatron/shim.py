"""Megatron-core on a machine without CUDA: a narrow stand-in for the few calls that have no CPU switch.

Only the listed Megatron modules see it, through their own global name `torch`; `torch` itself is not touched, so
transformers and everything else in the process behave as before. On a machine with CUDA nothing is installed.
"""

import contextlib
import functools
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable

import torch

# Modules that name a CUDA device or stream on the paths we run (megatron-core 0.19.2).
_MODULES = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.utils",
)
_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
_CPU = torch.device("cpu")


class _IdleStream:
    """The stream of a device that runs everything in order, and any event of it."""

    def __init__(self, device: object = None) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> "_IdleStream":
        return self

    def wait_event(self, event: object) -> None: ...


class _CpuCuda(types.ModuleType):
    """`torch.cuda` where there is none."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.current_device = lambda: _CPU
        self.Stream = self.current_stream = _IdleStream
        self.stream = lambda stream: contextlib.nullcontext()
        self.synchronize = lambda device=None: None

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """`torch` for one Megatron module: what is made "on cuda" is made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _name_types_as_cuda() -> None:
    """Megatron's optimizers compare `tensor.type()` with 'torch.cuda.FloatTensor': they, and they alone, get that."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        answer = original(self, *args, **kwargs)
        if args or kwargs or not sys._getframe(1).f_globals["__name__"].startswith("megatron.core.optimizer"):
            return answer
        return answer.replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_


@functools.cache
def install() -> None:
    """Makes Megatron run here; once per process, nothing to do where CUDA is. Also mutes its start-up notices."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = [importlib.import_module(name) for name in _MODULES]
        random = importlib.import_module("megatron.core.tensor_parallel.random")
    if torch.cuda.is_available():
        return
    stand_in = _CpuTorch()
    for module in modules:
        module.torch = stand_in
    _name_types_as_cuda()
    # Recomputation takes the state of the GPU's random numbers, to set it again.
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **kwargs: None
