"""Packed micro-batches: rows of a Ragged laid end to end, with what attention and the losses need to find them."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from models.megatron.shares import Shares
from ops.ragged import Ragged, offsets_of

_ONE = Shares()
_SLACK = 16  # padding, in tokens, that costs less than a further attention call


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length that one attention call takes, padded to `width`."""

    start: int  # first slot in the padded layout
    rows: int
    width: int


@dataclass(frozen=True)
class Padded:
    """Rows in buckets, for attention that takes rows of one length at a time."""

    buckets: list[Bucket]
    slots: torch.Tensor | None  # [padded] int64, token in each slot; None: slots are the tokens
    place: torch.Tensor | None  # [total] int64, slot of each token


@dataclass(frozen=True)
class Split:
    """The tokens of this context rank, and where the keys and values of all ranks lie once they are gathered."""

    own: torch.Tensor  # [local] int64, packed index of each token of this rank
    local: torch.Tensor  # [total] int64, where this rank has each packed token; -1: elsewhere
    buckets: list[Bucket]  # of the keys: same rows as the queries' buckets, `context` times as wide
    slots: torch.Tensor  # [padded] int64, gathered token in each slot of the keys
    place: torch.Tensor  # [total] int64, slot of each gathered token
    positions: list[torch.Tensor]  # per bucket [rows, local width] int64, index within the row of each query

    @property
    def total(self) -> int:
        return len(self.local)


@dataclass
class PackedBatch(PackedSeqParams):
    """One micro-batch of `total` tokens, as Megatron carries it to the attention layers; padding counts as tokens.

    `cu_seqlens_*` stay unset: Megatron would only use them for its own rotary embedding. With context parallelism
    `tokens` to `bounds` are of this rank's tokens; `at` numbers those of all ranks, in packed order.
    """

    rows: np.ndarray = field(kw_only=True)  # [rows] int64, their numbers in the caller's Ragged
    at: np.ndarray = field(kw_only=True)  # [tokens of the rows] int64, packed index of each
    tokens: torch.Tensor = field(kw_only=True)  # [1, total] int64
    positions: torch.Tensor = field(kw_only=True)  # [total] float32, index within the row
    lengths: np.ndarray = field(kw_only=True)  # [rows] int64 of them as packed, then that of a row of padding, if any
    groups: list[np.ndarray] = field(kw_only=True)  # which of `lengths` are similar
    bounds: torch.Tensor = field(kw_only=True)  # [len(lengths) + 1] int32, where each begins, and the end
    split: Split | None = field(kw_only=True)  # with context parallelism
    cos: torch.Tensor | None = None  # [total, 1, head_dim / 2], set by the model
    sin: torch.Tensor | None = None

    @cached_property
    def padded(self) -> Padded:
        """Made when attention first asks for it: a kernel for rows of any length needs none."""
        buckets, *indices = _layout(self.lengths, self.groups)
        tensors = (None if x is None else torch.from_numpy(x).to(self.tokens.device) for x in indices)
        return Padded(buckets, *tensors)


def flat_indices(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[tokens] int64: where the tokens of `rows`, in that order, lie in a Ragged with these offsets."""
    lengths = (offsets[1:] - offsets[:-1])[rows]
    shift = offsets[:-1][rows] - offsets_of(lengths)[:-1]
    return np.arange(lengths.sum()) + np.repeat(shift, lengths)


def pack(streams: Ragged, rows: np.ndarray, device: torch.device, shares: Shares = _ONE) -> PackedBatch:
    """The given rows as one packed micro-batch on `device`, padded as `shares` wants it."""
    lengths = streams.lengths[rows]
    padded = shares.padded(lengths)
    starts, total = offsets_of(padded)[:-1], int(padded.sum())
    at = np.arange(lengths.sum()) + np.repeat(starts[: len(rows)] - offsets_of(lengths)[:-1], lengths)
    tokens = np.zeros(total, np.int64)
    tokens[at] = streams.values[flat_indices(streams.offsets, rows)]
    positions = (np.arange(total) - np.repeat(starts, padded)).astype(np.float32)
    groups, split = bucket_rows(padded), None
    if shares.context > 1:
        split, own = _split(padded, groups, shares, device), shares.own_tokens(padded, shares.context_rank)
        tokens, positions, padded = tokens[own], positions[own], padded // shares.context
    return PackedBatch(
        qkv_format="thd",
        rows=rows,
        at=at,
        tokens=torch.from_numpy(tokens).to(device)[None],
        positions=torch.from_numpy(positions).to(device),
        lengths=padded,
        groups=groups,
        bounds=torch.from_numpy(offsets_of(padded).astype(np.int32)).to(device),
        split=split,
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


def _layout(lengths: np.ndarray, groups: list[np.ndarray]) -> tuple[list[Bucket], np.ndarray | None, np.ndarray | None]:
    """Buckets, the token in each slot (padding repeats the row's last token), the slot of each token."""
    starts = offsets_of(lengths)[:-1]
    buckets, slots, place = [], [], np.zeros(int(lengths.sum()), np.int64)
    filled = 0
    for group in groups:
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


def _split(padded: np.ndarray, groups: list[np.ndarray], shares: Shares, device: torch.device) -> Split:
    own = shares.own_tokens(padded, shares.context_rank)
    gathered = np.concatenate([shares.own_tokens(padded, rank) for rank in range(shares.context)])
    local = np.full(len(gathered), -1)
    local[own] = np.arange(len(own))
    buckets, slots, place = _layout(padded, groups)
    if slots is None:
        slots = place = np.arange(len(gathered))
    starts, widths = offsets_of(padded)[:-1], padded // shares.context
    positions = own - np.repeat(starts, widths)
    queries, in_slot, _ = _layout(widths, groups)
    positions = positions if in_slot is None else positions[in_slot]
    seen = (positions[b.start : b.start + b.rows * b.width].reshape(b.rows, b.width) for b in queries)
    return Split(
        own=torch.from_numpy(own).to(device),
        local=torch.from_numpy(local).to(device),
        buckets=buckets,
        slots=torch.from_numpy(np.argsort(gathered)[slots]).to(device),
        place=torch.from_numpy(place[gathered]).to(device),
        positions=[torch.from_numpy(p).to(device) for p in seen],
    )
