"""Which part of a whole tensor a rank holds, and whole tensors from the parts of all ranks."""

import re
from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from models.megatron import ranks
from models.megatron.mapping import Tensors
from models.megatron.model import Trunk
from models.megatron.value_head import ValueHead

_GATE_AND_UP = "linear_fc1.weight"  # two halves, each of which is split
_BY_ROWS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "word_embeddings.weight",
    "output_layer.weight",
)
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_TIED = {"output_layer.weight": "embedding.word_embeddings.weight"}
_AT_ONCE = 32  # tensors that travel to the first rank together


def own_part(name: str, whole: torch.Tensor) -> torch.Tensor:
    """This tensor rank's part of a parameter under Megatron's name."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if name.endswith(_GATE_AND_UP):
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    axis = _axis(name)
    return whole if axis is None else whole.chunk(size, axis)[rank]


def whole_of(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of `own_part`, from the parts of all tensor ranks in order."""
    if len(parts) == 1:
        return parts[0]
    if name.endswith(_GATE_AND_UP):
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
    axis = _axis(name)
    return parts[0] if axis is None else torch.cat(parts, axis)


def named_parameters(module: Trunk | ValueHead) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by the names that they have in the whole model.

    The last stage's copy of a tied embedding has the embedding's name, so that both get the same weights. Of the value
    heads of all stages only the last one counts.
    """
    if isinstance(module, ValueHead):
        return dict(module.named_parameters()) if parallel_state.is_pipeline_last_stage() else {}
    offset = get_transformer_layer_offset(module.config)
    named = {}
    for name, param in module.named_parameters():
        name = re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) + offset), name)
        named[_TIED.get(name, name) if module.share_embeddings_and_output_weights else name] = param
    return named


def collect(named: Mapping[str, torch.Tensor]) -> Tensors | None:
    """Whole tensors on the first rank, from what all ranks hold; None on the other ranks.

    named: this rank's parts, which it gets back, where they are, if it shares the model with no other; else the tensors
    are on the host. Copies of the model are left out: only its first copy sends. What more than one pipeline stage has
    (a tied embedding) is taken from the first of them.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return None
    group, names = parallel_state.get_model_parallel_group(), list(named)
    if group.size() == 1:
        return {name: part.detach() for name, part in named.items()} if ranks.is_first() else None
    lengths = ranks.to_all([len(names)], group)
    wholes: Tensors = {}
    for start in range(0, max(lengths), _AT_ONCE):
        sent = [
            (name, parallel_state.get_pipeline_model_parallel_rank(), named[name].detach().cpu())
            for name in names[start : start + _AT_ONCE]
        ]
        received = ranks.to_first(sent, group) or []
        found: dict[tuple[str, int], list[torch.Tensor]] = {}
        for name, stage, part in received:
            found.setdefault((name, stage), []).append(part)
        wholes |= {name: whole_of(name, parts) for (name, _), parts in found.items() if name not in wholes}
    return wholes if ranks.is_first() else None


def _axis(name: str) -> int | None:
    if name.endswith(_BY_ROWS):
        return 0
    return 1 if name.endswith(_BY_COLUMNS) else None
