"""Process groups: who takes part in training. Every rank calls `join` once, with the same layout."""

import atexit
import functools

import torch
from megatron.core import parallel_state

from models.megatron import shim


@functools.cache
def join(rank: int, world: int, rendezvous: str, threads: int) -> torch.device:
    """Enters the training world and returns this rank's device. The second call with equal arguments does nothing.

    rendezvous: "tcp://host:port", the same for all ranks. threads: CPU threads of this rank.
    Raises ValueError for a layout that is not built yet, and for a second, different world in one process.
    """
    if world != 1 or rank != 0:
        raise ValueError(f"rank {rank} of world {world}: only one data-parallel rank is supported; use rank 0 of 1")
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
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1
    )
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
