"""Statistics of sibling trajectories, and the advantages that follow from them: one scalar per trajectory."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

STD_KINDS = ("population", "unbiased")


@dataclass(frozen=True)
class GroupStatistics:
    """Over the finite rewards of each group, [groups]."""

    mean: np.ndarray  # float64, NaN where no reward is finite
    std: np.ndarray  # float64, NaN where no reward is finite, exactly 0 where all are equal
    finite: np.ndarray  # int64, how many there are


def group_numbers(ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """[rows] string ids -> [rows] int64: 0, 1, ... in the order in which the groups first appear.

    Plain or dictionary-encoded, chunked at will. Raises ValueError for a null id.
    """
    if ids.null_count:
        raise ValueError(f"group_id: {ids.null_count} null ids; every trajectory needs the id of its group")
    encoded = pc.cast(ids, pa.string()).dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks() if encoded.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def statistics(rewards: np.ndarray, groups: np.ndarray, std: str = "population") -> GroupStatistics:
    """rewards [rows] float, non-finite ones left out; groups [rows] int64 group numbers, in any order.

    std: `population` divides by n, `unbiased` by n - 1. A group whose rewards are all equal (compared exactly: a mean
    rounds) has std 0 and that very reward as its mean. Raises ValueError for another `std`.
    """
    if std not in STD_KINDS:
        raise ValueError(f"std {std!r}: it must be one of {', '.join(STD_KINDS)}")
    finite = np.isfinite(rewards)
    kept, groups_of_kept, count = rewards[finite].astype(np.float64), groups[finite], _group_count(groups)
    n = np.bincount(groups_of_kept, minlength=count)
    first = np.full(count, np.nan)
    first[groups_of_kept[::-1]] = kept[::-1]
    differing = np.bincount(groups_of_kept, kept != first[groups_of_kept], count) > 0
    mean = np.where(differing, np.bincount(groups_of_kept, kept, count) / np.maximum(n, 1), first)
    squares = np.bincount(groups_of_kept, (kept - mean[groups_of_kept]) ** 2, count)
    divisor = np.maximum(n - (std == "unbiased"), 1)
    return GroupStatistics(mean, np.where(n > 0, np.sqrt(squares / divisor), np.nan), n)


def _group_count(groups: np.ndarray) -> int:
    return int(groups.max()) + 1 if len(groups) else 0


def group(rewards: np.ndarray, groups: np.ndarray, *, std: str = "population", eps: float = 1e-6) -> np.ndarray:
    """(r - mean_g) / (std_g + eps); exactly 0 for a non-finite r, a group of one, or one whose rewards are all equal.

    rewards [rows] float; groups [rows] int64; the result [rows] float64. Source: GRPO 2402.03300.
    """
    seen = statistics(rewards, groups, std)
    return _centered(rewards, groups, seen) / _nonzero(seen.std[groups] + eps)


def group_center(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """r - mean_g; exactly 0 in the same cases as `group`. Source: Dr.GRPO 2503.20783."""
    return _centered(rewards, groups, statistics(rewards, groups))


def global_(rewards: np.ndarray, *, std: str = "population", eps: float = 1e-6) -> np.ndarray:
    """(r - mean) / (std + eps) over all finite rewards; exactly 0 in the same cases as `group`."""
    return group(rewards, np.zeros(len(rewards), np.int64), std=std, eps=eps)


def _centered(rewards: np.ndarray, groups: np.ndarray, seen: GroupStatistics) -> np.ndarray:
    return np.where(np.isfinite(rewards), rewards - seen.mean[groups], 0.0)


def _nonzero(divisor: np.ndarray) -> np.ndarray:
    """1 for the 0 or NaN of groups whose advantages are 0 anyway."""
    return np.where(divisor > 0, divisor, 1.0)
