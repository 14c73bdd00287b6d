"""Packed micro-batches: rows of a Ragged laid end to end, with what attention and the losses need to find them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ops.ragged import Ragged, offsets_of

_SLACK = 16  # padding, in tokens, that costs less than a further attention call


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length that one attention call takes, padded to `width`."""

    start: int  # first slot in the padded layout
    rows: int
    width: int


@dataclass
class PackedBatch(PackedSeqParams):
    """One micro-batch of `total` tokens, as Megatron carries it to the attention layers.

    `cu_seqlens_*` stay unset: Megatron would only use them for its own rotary embedding.
    """

    rows: np.ndarray = field(kw_only=True)  # [rows] int64, their numbers in the caller's Ragged
    tokens: torch.Tensor = field(kw_only=True)  # [1, total] int64
    positions: torch.Tensor = field(kw_only=True)  # [total] float32, index within the row
    buckets: list[Bucket] = field(kw_only=True)
    slots: torch.Tensor | None = field(kw_only=True)  # [padded] token in each slot; None: slots are the tokens
    place: torch.Tensor | None = field(kw_only=True)  # [total] slot of each token
    cos: torch.Tensor | None = None  # [total, 1, head_dim / 2], set by the model
    sin: torch.Tensor | None = None


def flat_indices(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[tokens] int64: where the tokens of `rows`, in that order, lie in a Ragged with these offsets."""
    lengths = (offsets[1:] - offsets[:-1])[rows]
    shift = offsets[:-1][rows] - offsets_of(lengths)[:-1]
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)


def pack(streams: Ragged, rows: np.ndarray, device: torch.device) -> PackedBatch:
    """The given rows as one packed micro-batch on `device`."""
    lengths = streams.lengths[rows]
    starts = offsets_of(lengths)[:-1]
    total = int(lengths.sum())
    tokens = streams.values[flat_indices(streams.offsets, rows)].astype(np.int64)
    buckets, slots, place = _layout(lengths, starts)
    return PackedBatch(
        qkv_format="thd",
        rows=rows,
        tokens=torch.from_numpy(tokens).to(device)[None],
        positions=torch.from_numpy((np.arange(total) - np.repeat(starts, lengths)).astype(np.float32)).to(device),
        buckets=buckets,
        slots=None if slots is None else torch.from_numpy(slots).to(device),
        place=None if place is None else torch.from_numpy(place).to(device),
    )


def bucket_rows(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups row numbers by length, longest first; empty rows are in no bucket.

    A row is padded by at most max(16, a quarter of its bucket's longest row) tokens, so a long outlier stands alone.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    groups: list[np.ndarray] = []
    while len(order):
        longest = lengths[order[0]]
        shortest = longest - max(_SLACK, longest // 4)
        count = int(np.searchsorted(-lengths[order], -shortest, side="right"))
        groups.append(np.sort(order[:count]))
        order = order[count:]
    return groups


def _layout(lengths: np.ndarray, starts: np.ndarray) -> tuple[list[Bucket], np.ndarray | None, np.ndarray | None]:
    """Buckets, the token in each slot (padding repeats the row's last token), the slot of each token."""
    buckets, slots, place = [], [], np.zeros(int(lengths.sum()), np.int64)
    filled = 0
    for group in bucket_rows(lengths):
        width = int(lengths[group].max())
        column = np.minimum(np.arange(width)[None], lengths[group][:, None] - 1)
        token = (starts[group][:, None] + column).ravel()
        real = (np.arange(width)[None] < lengths[group][:, None]).ravel()
        place[token[real]] = filled + np.flatnonzero(real)
        buckets.append(Bucket(filled, len(group), width))
        slots.append(token)
        filled += len(token)
    if not buckets:
        return [], None, None
    token = np.concatenate(slots)
    if np.array_equal(token, np.arange(len(place))):
        return buckets, None, None
    return buckets, token, place
