"""Whether a model can be spread over a layout."""

import math

from data.config import LayoutConfig
from models.megatron.shape import ModelShape


def require_fit(shape: ModelShape, layout: LayoutConfig) -> None:
    """Raises ValueError, with the valid sizes, for a layout that does not divide the model."""
    shared = {
        "heads": shape.heads,
        "key-value groups": shape.kv_heads,
        "MLP width": shape.ffn,
        "vocabulary": shape.vocab,
    }
    faults = []
    if any(size % layout.tensor for size in shared.values()):
        sizes = ", ".join(f"{name} {size}" for name, size in shared.items())
        valid = _divisors(math.gcd(*shared.values()))
        faults.append(f"layout.tensor = {layout.tensor}: it must divide each of {sizes}; valid sizes are {valid}")
    if shape.experts and layout.tensor > 1 and not layout.sequence_parallel:
        faults.append(f"layout.tensor = {layout.tensor} with experts: set layout.sequence_parallel = true")
    if shape.layers % layout.pipeline:
        valid = _divisors(shape.layers)
        faults.append(f"layout.pipeline = {layout.pipeline}: it must divide the {shape.layers} layers: {valid}")
    if faults:
        raise ValueError("\n".join(faults))


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
