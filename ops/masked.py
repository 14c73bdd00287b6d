"""Statistics over the tokens of a mask. What stands at the other tokens is never read, be it NaN."""

import numpy as np
import pyarrow as pa

from ops.ragged import Ragged, from_arrow, row_sums, to_arrow


def whiten(values: np.ndarray, mask: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """(x - mean) / (population std + eps) at the masked-in tokens, 0 at the others.

    values [tokens] float, mask [tokens] bool; the result has the type of `values`. One token, or all of them equal
    (compared exactly), is centred only: 0. No token: zeros. Source: math.md 3.
    """
    kept = values[mask].astype(np.float64)
    white = np.zeros_like(values)
    if len(kept) and (kept != kept[0]).any():
        white[mask] = (kept - kept.mean()) / (kept.std() + eps)
    return white


def row_means(ragged: Ragged, mask: Ragged) -> np.ndarray:
    """[rows] float64: the mean of each row's masked-in tokens, 0 for a row without any."""
    kept = ragged.like(np.where(mask.values, ragged.values, 0.0))
    return row_sums(kept) / np.maximum(row_sums(mask), 1)


def spread(scalars: np.ndarray, action_mask: pa.ListArray | pa.ChunkedArray) -> pa.ListArray:
    """[rows] one number per trajectory -> list<float32>: that number at each action token, 0 at the others."""
    mask = from_arrow(action_mask, "action_mask")
    tokens = np.where(mask.values, np.repeat(scalars, mask.lengths), 0.0)
    return to_arrow(mask.like(tokens.astype(np.float32)), pa.float32())
