"""The GPU's kernels on a CPU, by Triton's interpreter."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import models.megatron

NAME = "models.megatron.kernels"


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton interprets if told so before it is imported: so it is imported anew, and the kernels with it."""
    before = {name: module for name, module in sys.modules.items() if _is_concerned(name)}
    for name in before:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(models.megatron, "kernels", importlib.import_module(NAME), raising=False)
        yield
    for name in [name for name in sys.modules if _is_concerned(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def _is_concerned(name: str) -> bool:
    """Triton's compiled module cannot be loaded twice."""
    return name == NAME or ((name + ".").startswith("triton.") and not name.startswith("triton._C"))
