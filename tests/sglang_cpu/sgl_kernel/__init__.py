"""Stands in for SGLang's compiled kernels, which need a GPU: one function in plain torch, the others only by name."""

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, *_: Any
) -> None:
    """Writes each request's new cache places, which follow one another in `places`, into its row of the table."""
    used = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[used : used + end - start].to(table.dtype)
        used += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
