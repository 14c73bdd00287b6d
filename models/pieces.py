"""sha256 of the pieces of tensors' bytes, by threads: one stream of hashing would be slower than a train step."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

PIECE = 2**22  # bytes; part of what a digest means
THREADS = 16
FEW = 2**23  # bytes that are hashed sooner than threads are started


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8, on the tensor's device; a copy only of one that is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def hash_pieces(tensors: Sequence[torch.Tensor]) -> list[list[bytes]]:
    """Of each tensor the sha256 of each PIECE of its bytes, in order; none of an empty one."""
    cut = [list(flat_bytes(tensor).split(PIECE)) if tensor.numel() else [] for tensor in tensors]
    pieces = [piece for parts in cut for piece in parts]
    if any(piece.is_cuda for piece in pieces):
        torch.cuda.current_stream().synchronize()  # the threads copy on streams of their own
    threads = min(THREADS, len(os.sched_getaffinity(0)), len(pieces))
    if threads < 2 or sum(map(len, pieces)) <= FEW:
        found = iter(list(map(_sha256, pieces)))
    else:
        with ThreadPoolExecutor(threads, "sha256") as pool:
            found = iter(list(pool.map(_sha256, pieces)))
    return [[next(found) for _ in parts] for parts in cut]


def _sha256(piece: torch.Tensor) -> bytes:
    if not piece.is_cuda:
        return hashlib.sha256(memoryview(piece.numpy())).digest()
    with torch.cuda.device(piece.device), torch.cuda.stream(torch.cuda.Stream()):
        host = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True)  # from torch's cache after the first time
        host.copy_(piece, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return hashlib.sha256(memoryview(host.numpy())).digest()
