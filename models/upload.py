"""A safetensors file onto a device, by several threads: one alone would copy slower than the file is read or sent."""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

PIECE = 16 * 2**20  # bytes
THREADS = 8
ALIGNED = 16  # bytes: what vectorised kernels want of an address
LENGTH = 8  # bytes of the header's length, little-endian, at the start of the file


def upload(path: Path, device: str, dtypes: dict[str, str]) -> dict[str, torch.Tensor]:
    """Every tensor of the file. dtypes: safetensors' name -> torch's.

    Raises ValueError for another dtype, and for a file that is shorter than it says.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        start = LENGTH + int.from_bytes(os.pread(file, LENGTH, 0), "little")
        header = json.loads(os.pread(file, start - LENGTH, LENGTH))
        header.pop("__metadata__", None)
        if odd := sorted({entry["dtype"] for entry in header.values()} - set(dtypes)):
            raise ValueError(f"{path}: tensors of type {odd}; all must be one of {list(dtypes)}: convert the model")
        data = torch.empty(
            max((entry["data_offsets"][1] for entry in header.values()), default=0), dtype=torch.uint8, device=device
        )
        _fill(data, file, start, path)
    finally:
        os.close(file)
    return {name: _tensor(data, entry, dtypes) for name, entry in header.items()}


def _tensor(data: torch.Tensor, entry: dict[str, Any], dtypes: dict[str, str]) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    piece = data[begin:end].clone() if begin % ALIGNED else data[begin:end]
    return piece.view(getattr(torch, dtypes[entry["dtype"]])).view(entry["shape"])


def _fill(data: torch.Tensor, file: int, start: int, path: Path) -> None:
    """`data` [bytes] from the file's bytes at `start`."""
    staging: SimpleQueue[_Staging] = SimpleQueue()
    for _ in range(min(THREADS, math.ceil(len(data) / PIECE))):
        staging.put(_Staging(data.device))

    def copy(offset: int) -> None:
        held = staging.get()
        try:
            held.copy(file, start + offset, data[offset : offset + PIECE], path)
        finally:
            staging.put(held)

    with ThreadPoolExecutor(THREADS, "upload") as pool:
        list(pool.map(copy, range(0, len(data), PIECE)))


class _Staging:
    """A piece of host memory from which the device copies by itself, and a queue of its own for that."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(PIECE, dtype=torch.uint8, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        if self._stream is not None:  # the target's memory may still be in use by what was its owner
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, file: int, offset: int, target: torch.Tensor, path: Path) -> None:
        """Returns when it has arrived."""
        filled = 0
        view = memoryview(self._memory.numpy())[: len(target)]
        while filled < len(target):
            got = os.preadv(file, [view[filled:]], offset + filled)
            if got == 0:
                raise ValueError(f"{path}: shorter than its header says; copy it again")
            filled += got
        with torch.cuda.stream(self._stream):  # of None: nothing is changed
            target.copy_(self._memory[: len(target)], non_blocking=self._stream is not None)
        if self._stream is not None:
            self._stream.synchronize()
