"""Arrow columns from what a test can show at a glance."""

from collections.abc import Callable, Sequence

import pyarrow as pa
import pytest

Floats = Callable[..., pa.ListArray]
Masks = Callable[..., pa.ListArray]


@pytest.fixture(scope="session")
def floats() -> Floats:
    """floats([1, 2], [3]) -> list<float32> of two rows."""

    def build(*rows: Sequence[float]) -> pa.ListArray:
        return pa.array([[float(x) for x in row] for row in rows], pa.list_(pa.float32()))

    return build


@pytest.fixture(scope="session")
def masks() -> Masks:
    """masks("0011", "1") -> list<bool> of two rows."""

    def build(*rows: str) -> pa.ListArray:
        return pa.array([[bit == "1" for bit in row] for row in rows], pa.list_(pa.bool_()))

    return build
