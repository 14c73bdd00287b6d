"""Packed rows of different lengths: values plus offsets, the form Arrow stores and training reads."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Ragged:
    """`rows` rows over one flat array; row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: np.ndarray  # [tokens] any dtype
    offsets: np.ndarray  # [rows + 1] int64, offsets[0] == 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[rows] int64"""
        return np.diff(self.offsets)

    def row(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: np.ndarray) -> "Ragged":
        """The given rows, in the given order, as a new Ragged."""
        parts = [self.row(int(i)) for i in rows]
        values = np.concatenate(parts) if parts else self.values[:0]
        return Ragged(values, offsets_of(np.array([len(p) for p in parts], np.int64)))

    def like(self, values: np.ndarray) -> "Ragged":
        """Other values, [tokens], over the same rows."""
        if len(values) != len(self.values):
            raise ValueError(f"values: {len(values)} for {len(self.values)} tokens; they must be equal in length")
        return Ragged(values, self.offsets)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """[rows] lengths -> [rows + 1] int64 offsets."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def from_rows(rows: list, dtype: np.dtype | type) -> Ragged:
    """Python or numpy rows -> Ragged of the given dtype."""
    arrays = [np.asarray(row, dtype) for row in rows]
    values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return Ragged(values, offsets_of(np.array([len(a) for a in arrays], np.int64)))


def row_sums(ragged: Ragged) -> np.ndarray:
    """[rows] the sum of each row: int64 for bools and integers, float64 for floats; 0 for an empty row."""
    dtype = np.float64 if ragged.values.dtype.kind == "f" else np.int64
    sums = np.zeros(len(ragged), dtype)
    filled = ragged.lengths > 0
    if filled.any():
        sums[filled] = np.add.reduceat(ragged.values, ragged.offsets[:-1][filled], dtype=dtype)
    return sums


def flatten(column: pa.Array | pa.ChunkedArray, name: str) -> tuple[pa.Array, np.ndarray]:
    """An Arrow list column -> (its tokens as one flat Arrow array, [rows + 1] int64 offsets that start at 0).

    Right for sliced and chunked columns, without a copy for one chunk.
    Raises ValueError, naming the column, for anything but a list of non-null numbers or bools without null rows.
    """
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise ValueError(f"{name}: {column.type}; it must be a list column")
    if not (pa.types.is_primitive(column.type.value_type)):
        raise ValueError(f"{name}: {column.type}; its items must be numbers or bools")
    if column.null_count:
        raise ValueError(f"{name}: {column.null_count} null rows; every row needs a list, if need be an empty one")
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    # A sliced chunk keeps its parent's offsets, which then do not start at 0.
    lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in chunks] or [np.zeros(0, np.int64)]
    if any((part < 0).any() for part in lengths):
        raise ValueError(f"{name}: list offsets decrease; they must never")
    flat = [chunk.flatten() for chunk in chunks] or [pa.array([], column.type.value_type)]
    if nulls := sum(tokens.null_count for tokens in flat):
        raise ValueError(f"{name}: {nulls} null tokens; fill them before")
    return flat[0] if len(flat) == 1 else pa.concat_arrays(flat), offsets_of(np.concatenate(lengths))


def from_arrow(column: pa.Array | pa.ChunkedArray, name: str) -> Ragged:
    """An Arrow list column -> Ragged: as `flatten`, with numpy values (a copy for bools, which Arrow packs in bits)."""
    tokens, offsets = flatten(column, name)
    return Ragged(tokens.to_numpy(zero_copy_only=False), offsets)


def to_arrow(ragged: Ragged, value_type: pa.DataType) -> pa.ListArray:
    """Ragged -> list<value_type>. Raises ValueError above 2^31 - 1 tokens, the limit of list offsets."""
    if ragged.offsets[-1] >= 2**31:
        raise ValueError(f"{ragged.offsets[-1]} tokens in one array; at most 2^31 - 1 fit: write smaller shards")
    values = pa.array(ragged.values, value_type)
    return pa.ListArray.from_arrays(pa.array(ragged.offsets.astype(np.int32)), values)
