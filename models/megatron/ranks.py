"""Process groups: who takes part in training. Every rank calls `join` once, with the same layout.

The *first* rank speaks for all to the outside: it alone reads arguments that differ between ranks, and writes results.
*Speakers* know a data-parallel share's outputs: of each share one rank, on the last pipeline stage.
"""

import atexit
import contextlib
import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed import ProcessGroup

from data.config import LayoutConfig
from models.megatron import shim


@functools.cache
def join(rank: int, world: int, rendezvous: str, threads: int, layout: LayoutConfig) -> torch.device:
    """Enters the training world and returns this rank's device. The second call with equal arguments does nothing.

    rendezvous: "tcp://host:port", the same for all ranks. threads: CPU threads of this rank.
    Raises ValueError for a world of another size than the layout, and for a second, different world in one process.
    """
    if world != layout.ranks or not 0 <= rank < world:
        raise ValueError(
            f"rank {rank} of world {world}: this layout has {layout.ranks} ranks (tensor · pipeline · context · data); "
            "start as many, numbered from 0"
        )
    if torch.distributed.is_initialized():
        raise ValueError(f"rendezvous {rendezvous}: this process is in a training world already; start a new process")
    shim.install()
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world)
    atexit.register(torch.distributed.destroy_process_group)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
    )
    # Nothing is dropped out, so no random states need keeping apart; Megatron's tracker would ask for seeded ones.
    get_cuda_rng_tracker().fork = contextlib.nullcontext
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def is_first() -> bool:
    return torch.distributed.get_rank() == 0


def is_speaker() -> bool:
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def told_by_first[Value](value: Value) -> Value:
    """The first rank's value, on every rank."""
    if torch.distributed.get_world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def from_speakers[Item](items: list[Item]) -> list[Item]:
    """The speakers' items, in the order of data-parallel ranks, on every rank. Other ranks' items are ignored."""
    return to_all(items if is_speaker() else [], torch.distributed.group.WORLD)


def to_all[Item](items: list[Item], group: ProcessGroup) -> list[Item]:
    """The items of all ranks of `group`, by rank, on each of them."""
    if group.size() == 1:
        return items
    boxes: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(boxes, items, group=group)
    return [item for box in boxes for item in box]


def to_first[Item](items: list[Item], group: ProcessGroup | None = None) -> list[Item] | None:
    """The items of all ranks of `group` (default: everyone), by rank, on the first rank; None on the others.

    The group must contain the first rank.
    """
    if torch.distributed.get_world_size(group) == 1:
        return items
    boxes: list[Any] | None = [None] * torch.distributed.get_world_size(group) if is_first() else None
    torch.distributed.gather_object(items, boxes, dst=0, group=group)
    return None if boxes is None else [item for box in boxes for item in box]
