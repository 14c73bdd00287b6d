"""GAE from Arrow columns against the usual padded torch loop over time, on the same data, in one process.

    .venv/bin/python tests/benchmarks/gae.py

The loop is what PPO trainers commonly run: tensors [64, 8192], one step per column from the last to the first, the next
value and the running advantage carried over masked columns. Both results must agree before anything is timed.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from ops.gae import gae
from ops.ragged import Ragged, from_arrow, offsets_of, to_arrow

ROWS, LONGEST, THREADS = 64, 8192, 2
GAMMA, LAM = 1.0, 0.95
GOAL_RATIO, GOAL_TOKENS = 100.0, 100e6


@dataclass(frozen=True)
class Padded:
    """[64, 8192] float32 each, rows padded at the right."""

    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Packed:
    """list<float32>, list<float32>, list<bool> of the same rows."""

    rewards: pa.ListArray
    values: pa.ListArray
    mask: pa.ListArray


def padded_gae(data: Padded) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [64, 8192], 0 at masked positions."""
    next_value = advantage = torch.zeros(len(data.values))
    columns = []
    for t in reversed(range(data.values.shape[1])):
        m = data.mask[:, t]
        delta = data.rewards[:, t] + GAMMA * next_value - data.values[:, t]
        advantage = m * (delta + GAMMA * LAM * advantage) + (1 - m) * advantage
        next_value = m * data.values[:, t] + (1 - m) * next_value
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages * data.mask, (advantages + data.values) * data.mask


def make(lengths: np.ndarray, rng: np.random.Generator) -> tuple[Packed, Padded]:
    """Rows of a prompt (256 tokens, half of a short row), then turns of 400 sampled and 100 observed tokens."""
    offsets = offsets_of(lengths)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = (position >= np.minimum(256, np.repeat(lengths // 2, lengths))) & (position % 500 < 400)
    rewards = (rng.random(len(mask)) < 0.001).astype(np.float32) * mask
    values = rng.normal(0.5, 0.2, len(mask)).astype(np.float32)
    columns = [Ragged(column, offsets) for column in (rewards, values, mask)]
    packed = Packed(*(to_arrow(c, t) for c, t in zip(columns, (pa.float32(), pa.float32(), pa.bool_()), strict=True)))
    return packed, Padded(*(pad(column) for column in columns))


def pad(column: Ragged) -> torch.Tensor:
    padded = torch.zeros(ROWS, LONGEST)
    for row in range(len(column)):
        padded[row, : column.lengths[row]] = torch.from_numpy(column.row(row).astype(np.float32))
    return padded


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def largest_difference(packed: Packed, padded: Padded) -> float:
    """Over advantages and returns of all tokens."""
    ours = gae(packed.rewards, packed.values, packed.mask, gamma=GAMMA, lam=LAM)
    differences = [(pad(from_arrow(a, "ours")) - b).abs().max() for a, b in zip(ours, padded_gae(padded), strict=True)]
    return float(torch.stack(differences).max())


def compare(name: str, lengths: np.ndarray) -> bool:
    packed, padded = make(lengths, np.random.default_rng(0))
    difference = largest_difference(packed, padded)
    loop = median_seconds(lambda: padded_gae(padded), 5)
    ours = median_seconds(lambda: gae(packed.rewards, packed.values, packed.mask, gamma=GAMMA, lam=LAM), 101)
    stream, actions = int(lengths.sum()), int(padded.mask.sum())
    print(f"{name}: {stream:,} tokens, {actions:,} of them valid (actions), mean length {lengths.mean():,.0f}")
    print(f"  largest difference   {difference:.1e}")
    print(f"  padded torch loop    {loop * 1e3:9.2f} ms   {actions / loop / 1e6:8.2f} M valid tokens/s")
    print(f"  ops.gae.gae          {ours * 1e3:9.3f} ms   {actions / ours / 1e6:8.1f} M valid tokens/s")
    print(f"  ratio                {loop / ours:9.0f} x")
    return difference < 1e-4 and loop / ours >= GOAL_RATIO and actions / ours >= GOAL_TOKENS


def main() -> int:
    torch.set_num_threads(THREADS)
    ragged = np.clip(np.random.default_rng(1).lognormal(7.3, 0.8, ROWS).astype(np.int64), 8, LONGEST)
    ragged[0] = LONGEST
    with torch.no_grad():
        reached = [compare("ragged rows", ragged), compare("full rows", np.full(ROWS, LONGEST, np.int64))]
    print(f"goals (equal to 1e-4, >= {GOAL_RATIO:.0f} x, >= {GOAL_TOKENS / 1e6:.0f} M valid tokens/s): {reached}")
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
