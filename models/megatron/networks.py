"""What a trainer trains: the policy, a value head on its trunk, or a critic with its own trunk and head."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from models.megatron import sharding
from models.megatron.batch import PackedBatch
from models.megatron.gather import here, joined
from models.megatron.head import Head
from models.megatron.mapping import Tensors, to_hf, to_megatron
from models.megatron.model import Trunk
from models.megatron.optimizer import Part
from models.megatron.shape import ModelShape
from models.megatron.value_head import ValueHead
from models.weights import read_tensors

CriticKind = Literal["none", "shared", "separate"]


@dataclass(frozen=True)
class Outputs:
    """What a pass over one micro-batch gives, on ranks of the last stage; parts that were not asked for are None."""

    logprobs: torch.Tensor | None  # [reads] float32
    entropy: torch.Tensor | None  # [reads] float32
    values: torch.Tensor | None  # [tokens] float32, value of the state after each token

    @property
    def device(self) -> torch.device:
        """Megatron's schedule asks where its losses go, for models with experts."""
        return next(x for x in (self.logprobs, self.values) if x is not None).device


@dataclass(frozen=True)
class Reads:
    """Which hidden states of a micro-batch predict something, and what."""

    at: torch.Tensor  # [reads] int64, index of the predicting token: the one before the predicted
    targets: torch.Tensor  # [reads] int64, the predicted token ids


class Networks:
    """Parts by name, in the order of their passes: `policy`, `critic` (a second trunk), `value_head`."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        critic: CriticKind,
        device: torch.device,
        sequence_parallel: bool = False,
    ) -> None:
        self.shape, self.dtype, self.critic_kind, self.device = shape, dtype, critic, device
        make = functools.partial(Trunk, shape, dtype, device, sequence_parallel=sequence_parallel)
        trunk = Part(make(with_output=True), dtype)
        self.parts = {"policy": trunk}
        if critic == "separate":
            trunk = self.parts["critic"] = Part(make(with_output=False), dtype)
        if critic != "none":
            head = ValueHead(trunk.module.config, device)
            self.parts["value_head"] = Part(head, torch.float32)
        self._finalize_together(trunk)

    def _finalize_together(self, with_head: Part) -> None:
        """A trunk's backward pass also fills its head's gradients: Megatron must reduce and scale both."""
        for part in (self.parts["policy"], with_head):
            part.module.config.finalize_model_grads_func = finalize_model_grads
        if head := self.parts.get("value_head"):
            with_head.module.config.finalize_model_grads_func = functools.partial(_finalize_with, head.module)

    def is_like(self, shape: ModelShape, dtype: torch.dtype, critic: CriticKind) -> bool:
        """Whether weights of such a model can be loaded here."""
        return (self.shape, self.dtype, self.critic_kind) == (shape, dtype, critic)

    def recompute(self, wanted: bool) -> None:
        """Whether passes from now on keep only each layer's input, and make the rest anew for the backward pass."""
        for name in ("policy", "critic"):
            if name in self.parts:
                config = self.parts[name].module.config
                config.recompute_granularity = "full" if wanted else None
                config.recompute_method, config.recompute_num_layers = ("uniform", 1) if wanted else (None, None)

    def load_policy(self, tensors: Tensors) -> None:
        """The policy's weights into every trunk, a zero head, fresh optimizers."""
        weights = to_megatron(tensors, self.shape)
        for name in ("policy", "critic"):
            if name in self.parts:
                _copy_into(self.parts[name].bare, weights)
        if head := self.parts.get("value_head"):
            with torch.no_grad():
                head.bare.weight.zero_()
                head.bare.bias.zero_()
        for part in self.parts.values():
            part.reset_optimizer()

    def policy_tensors(self) -> Tensors | None:
        """The policy's weights under Hugging Face's names, without any part of the critic; on the first rank only."""
        whole = sharding.collect(sharding.named_parameters(self.parts["policy"].bare))
        return None if whole is None else to_hf(whole, self.shape)

    def policy_pass(self, batch: PackedBatch, reads: Reads, temperature: float, frozen: bool = False) -> Outputs:
        """Log-probs and entropy at `reads`, and values if the head is on this trunk.

        frozen: gradients need not reach the trunk. In a pipeline they do, since each stage waits for the next one's.
        """
        trunk, shared = self.parts["policy"].module, self.critic_kind == "shared"

        def read(hidden: torch.Tensor, head: Head) -> Outputs:
            at, which = here(batch, reads.at)
            targets = reads.targets if which is None else reads.targets.index_select(0, which)
            seen = head.logprob_and_entropy(hidden.index_select(0, at), targets, temperature)
            logprobs, entropy = (joined(x, which, len(reads.at)) for x in seen)
            with torch.set_grad_enabled(grad):
                return Outputs(logprobs, entropy, self._values(batch, hidden) if shared else None)

        grad, piped = torch.is_grad_enabled(), parallel_state.get_pipeline_model_parallel_world_size() > 1
        with torch.set_grad_enabled(grad and not (frozen and not piped)):
            return trunk(batch, read)

    def critic_pass(self, batch: PackedBatch) -> Outputs:
        """Values from the separate critic."""
        return self.parts["critic"].module(batch, lambda hidden, head: Outputs(None, None, self._values(batch, hidden)))

    def _values(self, batch: PackedBatch, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens] float32, of the tokens of all context ranks."""
        values = self.parts["value_head"].module(hidden)
        return values if batch.split is None else joined(values, batch.split.own, batch.split.total)


def run_schedule[Item](
    part: Part, items: list[Item], forward: Callable[[Item], tuple[Any, Callable[..., Any]]], forward_only: bool
) -> list[Any]:
    """Megatron's schedule over the micro-batches `items`; returns what the loss functions left, in order.

    They are called on the last pipeline stage; other stages return an empty list.

    forward(item) -> (outputs, loss function). Training: loss function(outputs) -> (numerator, count, result), and the
    gradients end up divided by the sum of the counts over all micro-batches and data-parallel ranks. forward_only: loss
    function(outputs, non_loss_data=True) -> result, without gradients.
    """

    def step(iterator: Iterator[Item], model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        return forward(next(iterator))

    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(items),
            model=[part.module],
            num_microbatches=len(items),
            seq_length=1,  # unused: micro-batches differ in length
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def read_policy(folder: Path) -> tuple[ModelShape, torch.dtype, Tensors]:
    """Shape, dtype and tensors of a Hugging Face folder. Raises ValueError for mixed or unsupported dtypes."""
    shape, tensors = ModelShape.from_hf(folder), read_tensors(folder)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        names = sorted(str(dtype) for dtype in dtypes)
        raise ValueError(f"{folder}: dtypes {names}; all weights must be float32, or all bfloat16: convert them")
    return shape, dtypes.pop(), tensors


def _copy_into(trunk: Trunk, weights: Tensors) -> None:
    with torch.no_grad():
        for name, param in sharding.named_parameters(trunk).items():
            param.copy_(sharding.own_part(name, weights[name]))


def _finalize_with(head: torch.nn.Module, model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
    # Megatron looks for a tied embedding in the first stage's first module and in the last stage's last one.
    modules = [head, *model] if parallel_state.is_pipeline_last_stage() else [*model, head]
    finalize_model_grads(modules, *args, **kwargs)
