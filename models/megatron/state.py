"""The full training state on disk: Megatron's distributed checkpoint, in the form that any layout can load.

Megatron-core 0.19.2 without TransformerEngine and apex needs care in four places, each marked below.
"""

import queue
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from models.megatron import ranks, sharding
from models.megatron.networks import CriticKind, Networks
from models.megatron.optimizer import Part
from models.megatron.shape import CONFIG_FILE
from models.weights import tensors_digest

_STATES = ("param", "exp_avg", "exp_avg_sq")  # Megatron's names for a parameter's master and moments


def save(networks: Networks, config: bytes, folder: Path) -> None:
    """Writes the state into `folder`, missing or empty, with the model's config.json. All ranks see one folder.

    Raises FileExistsError on every rank for a folder that holds something.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if ranks.told_by_first(any(folder.iterdir())):
        raise FileExistsError(f"state {folder}: the folder is not empty; save each state into a folder of its own")
    # (1) A synchronous save still starts a multiprocessing Manager, which imports the main module again.
    filesystem_async._results_queue = queue.Queue()
    about = {"dtype": str(networks.dtype).removeprefix("torch."), "critic": networks.critic_kind}
    dist_checkpointing.save(_sharded(networks, loading=False), str(folder), content_metadata=about)
    if ranks.is_first():
        (folder / CONFIG_FILE).write_bytes(config)
    torch.distributed.barrier()


def describe(folder: Path) -> tuple[torch.dtype, CriticKind]:
    """What networks the state in `folder` is of. Raises FileNotFoundError if there is none."""
    if not (Path(folder) / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"state {folder}: no {CONFIG_FILE}; it is no complete training state")
    about = dist_checkpointing.load_content_metadata(str(folder))
    return getattr(torch, about["dtype"]), about["critic"]


def load(networks: Networks, folder: Path) -> None:
    """Fills parts that `folder` was saved from, on any layout, so that training goes on as if it had not stopped."""
    loaded = dist_checkpointing.load(_sharded(networks, loading=True), str(folder))
    for name, part in networks.parts.items():
        part.bare.load_state_dict(loaded[name]["model"])
        _load_optimizer(part, loaded[name]["optimizer"])
        part.steps = loaded[name]["steps"]


def digest(networks: Networks) -> str:
    """sha256 (hex) of weights, masters, moments and step counters by content, whatever the files look like.

    Equal states have one digest on every layout: whole tensors travel to the first rank, which tells the others.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, part in networks.parts.items():
        tensors[f"{name}.steps"] = torch.tensor(part.steps)
        for key, states in _states(part).items():
            wholes = sharding.collect(states) or {}
            tensors |= {f"{name}.{param}.{key}": whole for param, whole in wholes.items()}
    return ranks.told_by_first(tensors_digest(tensors) if ranks.is_first() else "")


def _states(part: Part) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments of this rank's parameters by kind and name, as far as the whole model's rank 0 of its
    data-parallel group needs them: the other ranks send theirs to it."""
    named = sharding.named_parameters(part.bare)
    gathered = {name: _over_data(part, param) for name, param in named.items()}
    return {key: {name: states[i] for name, states in gathered.items()} for i, key in enumerate(_STATES)}


def _over_data(part: Part, param: torch.nn.Parameter) -> list[torch.Tensor]:
    """_STATES of one parameter, whole on the first of the ranks that share its optimizer."""
    optimizer, group = part.optimizer, part.optimizer.data_parallel_group
    owned = param in optimizer.model_param_group_index_map
    own = optimizer._get_main_param_and_optimizer_states(param) if owned else {}
    if group.size() == 1:
        return [own[key].view(param.shape) for key in _STATES]
    # As integers: to add the zeros of ranks that do not have an element would turn -0.0 into 0.0.
    whole = torch.zeros(len(_STATES), param.numel(), dtype=torch.int32, device=param.device)
    if owned:
        piece = optimizer._get_model_param_range_map(param)["param"]
        for row, key in zip(whole, _STATES, strict=True):
            row[piece.start : piece.end] = own[key].detach().view(torch.int32)
    torch.distributed.reduce(whole, group_dst=0, group=group)
    return [row.view(torch.float32).view(param.shape) for row in whole]


def _sharded(networks: Networks, loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }
    state: dict[str, Any] = {}
    for name, part in networks.parts.items():
        model = part.bare.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
        optimizer = part.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        bare = {key.removeprefix(f"{name}."): value for key, value in model.items()}
        state[name] = {"model": bare, "optimizer": optimizer, "steps": part.steps}
    return state


def _load_optimizer(part: Part, loaded: dict[str, Any]) -> None:
    """(2) A fresh optimizer has no state to load into: Part makes it before any step.

    (3) Megatron looks for a tensor `step` in each loaded parameter state, where there is none: hide it meanwhile.
    (4) It then leaves all parameters one shared `step`, which each of them would advance: give each its own.
    """
    moments = loaded.pop("param_state")
    part.optimizer.load_state_dict(loaded)
    states = [part.optimizer.optimizer.state[p] for g in part.optimizer.param_groups for p in g["params"]]
    steps = [state.pop("step") for state in states]
    part.optimizer.load_parameter_state_from_fully_reshardable(moments)
    for state, step in zip(states, steps, strict=True):
        state["step"] = step.clone()
