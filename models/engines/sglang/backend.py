"""One SGLang, whatever the way to it, and what can go wrong with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

Answer = dict[str, Any]  # as SGLang gives it: output_ids, meta_info


class BackendLost(RuntimeError):
    """An SGLang that died or does not answer. What it had finished stays good; the rest can be asked of another."""


class BackendRefused(RuntimeError):
    """An SGLang that is alive and said no."""


@dataclass(frozen=True)
class Asked:
    name: str  # unique among all that was ever asked
    token_ids: list[int]
    sampling: dict[str, Any]  # as SGLang names it


class Backend(Protocol):
    """Not thread-safe but for `abort`. Every call may raise BackendLost."""

    device: str  # cpu or cuda

    def generate(self, asked: Sequence[Asked], arrived: Callable[[int, Answer], None], timeout_s: float) -> None:
        """Calls `arrived(place in asked, answer)` for each, in the order in which they finish.

        Raises BackendLost after `timeout_s`, when what is unfinished has been aborted.
        """
        ...

    def abort(self) -> None:
        """End what is being generated; its answers arrive with the finish reason `abort`."""
        ...

    def load_folder(self, folder: Path, tag: str) -> None:
        """Pause, put the folder's weights in place of the present ones, forget all prefixes, continue.

        `tag` is what `serving` and every answer then say. Raises BackendRefused.
        """
        ...

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], folder: Path, tag: str) -> None:
        """The same with weights that are in memory, on its kind of device, and in the folder too."""
        ...

    def serving(self) -> str:
        """The tag of the weights it serves, by its own account."""
        ...

    def checksums(self) -> list[dict[str, str]]:
        """Per rank: parameter (as SGLang fuses them) -> checksum of the bytes it holds."""
        ...

    def close(self) -> None:
        """Stop what was started for it."""
        ...


def too_late(late: int, asked: int, timeout_s: float) -> BackendLost:
    return BackendLost(
        f"SGLang: {late} of {asked} answers took longer than engine.timeout_s = {timeout_s:g} s; raise it, or lower "
        "engine.batch or sampling.max_new_tokens"
    )
