"""The full training state: whole tensors by name, the same on every layout, so that any layout can take it up."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.megatron import ranks, sharding
from models.megatron.networks import CriticKind, Networks
from models.megatron.optimizer import Part
from models.megatron.shape import CONFIG_FILE
from models.weights import tensors_digest

ARRAYS, ABOUT = "state.npz", "state.json"
_STATES = ("param", "exp_avg", "exp_avg_sq")  # Megatron's names for a parameter's master and moments


@dataclass(frozen=True)
class StateCopy:
    """A state on the host; what is trained from now on does not change it."""

    digest: str
    arrays: dict[str, np.ndarray]  # <part>.<parameter>.<one of _STATES> float32, <part>.steps int64
    about: dict[str, str]  # dtype of the weights, kind of critic
    config: bytes  # the model's config.json

    def write(self, folder: Path) -> None:
        """Into a folder that is missing or empty. Raises FileExistsError for one that holds something."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"state {folder}: the folder is not empty; save each state into a folder of its own")
        np.savez(folder / ARRAYS, allow_pickle=False, **self.arrays)
        (folder / ABOUT).write_text(json.dumps(self.about))
        (folder / CONFIG_FILE).write_bytes(self.config)


def copy(networks: Networks, config: bytes) -> StateCopy | None:
    """On the first rank; the others, which take part, get None."""
    tensors = _whole(networks)
    if not ranks.is_first():
        return None
    about = {"dtype": str(networks.dtype).removeprefix("torch."), "critic": networks.critic_kind}
    arrays = {name: tensor.to("cpu", copy=True).numpy() for name, tensor in tensors.items()}
    return StateCopy(tensors_digest(tensors), arrays, about, config)


def describe(folder: Path) -> tuple[torch.dtype, CriticKind]:
    """What networks the state in `folder` is of. Raises FileNotFoundError if there is none."""
    if missing := [name for name in (CONFIG_FILE, ABOUT, ARRAYS) if not (Path(folder) / name).is_file()]:
        raise FileNotFoundError(f"state {folder}: no {missing[0]}; it is no complete training state")
    about = json.loads((Path(folder) / ABOUT).read_text())
    return getattr(torch, about["dtype"]), about["critic"]


def load(networks: Networks, folder: Path) -> None:
    """Fills parts that `folder` was saved from, on any layout, so that training goes on as if it had not stopped."""
    with np.load(Path(folder) / ARRAYS, allow_pickle=False) as arrays:
        for name, part in networks.parts.items():
            for param_name, param in sharding.named_parameters(part.bare).items():
                wholes = (torch.from_numpy(arrays[f"{name}.{param_name}.{key}"]) for key in _STATES)
                _fill(part, param, [sharding.own_part(param_name, whole).reshape(-1) for whole in wholes])
            _set_steps(part, int(arrays[f"{name}.steps"]))


def digest(networks: Networks) -> str:
    """sha256 (hex) of weights, masters, moments and step counters by content, whatever the files look like.

    Equal states have one digest on every layout: whole tensors travel to the first rank, which tells the others.
    """
    tensors = _whole(networks)
    return ranks.told_by_first(tensors_digest(tensors) if ranks.is_first() else "")


def _whole(networks: Networks) -> dict[str, torch.Tensor]:
    """Masters, moments and step counters of all parts, on the first rank."""
    tensors: dict[str, torch.Tensor] = {}
    for name, part in networks.parts.items():
        tensors[f"{name}.steps"] = torch.tensor(part.steps)
        for key, states in _states(part).items():
            wholes = sharding.collect(states) or {}
            tensors |= {f"{name}.{param}.{key}": whole for param, whole in wholes.items()}
    return tensors


def _fill(part: Part, param: torch.nn.Parameter, flat: list[torch.Tensor]) -> None:
    """_STATES of one parameter, as whole as this tensor rank's part of it, into weight, master and moments."""
    with torch.no_grad():
        param.copy_(flat[0].view(param.shape))
    optimizer = part.optimizer
    if param not in optimizer.model_param_group_index_map:
        return  # another rank's
    piece = optimizer._get_model_param_range_map(param)["param"]
    own = optimizer._get_main_param_and_optimizer_states(param)
    with torch.no_grad():
        for key, values in zip(_STATES, flat, strict=True):
            own[key].view(-1).copy_(values[piece.start : piece.end])


def _set_steps(part: Part, steps: int) -> None:
    part.steps = steps
    for state in part.optimizer.optimizer.state.values():
        state["step"].fill_(steps)


def _states(part: Part) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments by kind, then by parameter; empty on ranks that are not the first to share an optimizer."""
    named = sharding.named_parameters(part.bare)
    gathered = {name: _over_data(part, param) for name, param in named.items()}
    found = {name: states for name, states in gathered.items() if states is not None}
    return {key: {name: states[i] for name, states in found.items()} for i, key in enumerate(_STATES)}


def _over_data(part: Part, param: torch.nn.Parameter) -> list[torch.Tensor] | None:
    """_STATES of one parameter, as whole as this tensor rank's part of it; on the first rank that shares its optimizer.

    The other ranks send it theirs, and get None.
    """
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
    if group.rank() != 0:
        return None
    return [row.view(torch.float32).view(param.shape) for row in whole.cpu()]
