"""Which trajectories share an optimizer step, and which of those share a packed forward pass."""

import numpy as np


def mini_batches(n_rows: int, size: int, seed: int) -> list[np.ndarray]:
    """Row numbers 0 .. n_rows - 1 in a seeded random order, cut into pieces of `size`; the last may be shorter.

    Disjoint, and together all rows; the same arguments give the same pieces on every machine. Raises ValueError for
    size < 1.
    """
    if size < 1:
        raise ValueError(f"size {size}: a mini-batch needs at least 1 row")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(n_rows)
    return [order[start : start + size] for start in range(0, n_rows, size)]


def pack(lengths: np.ndarray, rows: np.ndarray, budget: int) -> list[np.ndarray]:
    """Packs rows into micro-batches of at most `budget` tokens by first-fit decreasing (Johnson 1973).

    lengths [all rows] tokens of each row; rows: the row numbers to pack. A row longer than the budget goes alone.
    Returns row numbers per micro-batch, in the order in which the micro-batches were opened. Equal lengths keep the
    order of `rows`, so the result is deterministic. Raises ValueError for budget < 1.
    """
    if budget < 1:
        raise ValueError(f"budget {budget}: a micro-batch needs at least 1 token")
    rows = np.asarray(rows, np.int64)
    sizes = np.asarray(lengths)[rows]
    room = np.empty(len(rows), np.int64)  # left in each open micro-batch
    packed: list[list[int]] = []
    for i in np.argsort(-sizes, kind="stable"):
        fits = np.flatnonzero(room[: len(packed)] >= sizes[i])
        if not len(fits):
            room[len(packed)] = budget
            packed.append([])
        target = int(fits[0]) if len(fits) else len(packed) - 1
        room[target] -= sizes[i]
        packed[target].append(int(rows[i]))
    return [np.array(batch, np.int64) for batch in packed]
