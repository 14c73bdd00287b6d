"""Causal attention over packed rows: on a GPU one kernel for rows of any length, else SDPA by buckets of lengths."""

import inspect

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from models.megatron.batch import Bucket, PackedBatch, Padded, Split
from models.megatron.rotary import Rotate

# torch 2.14 wants to be told that heads share keys and values; 2.11 has no such argument, and its kernel takes them.
_SHARED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
LONG = 4096  # tokens, from which rows go to SDPA: at 8,192 1.27 times as fast on an H200, at <= 2,048 .82 times
_CAUSAL = (-1, 0)  # a window: every token before, none after


class PackedAttention(MegatronModule):
    """Megatron's core attention: rotary embedding, then causal attention within each row of a PackedBatch.

    The keyword arguments are those that Megatron's attention layer passes to any core attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,  # [tokens, heads, head_dim]
        key: torch.Tensor,  # [tokens, kv_heads, head_dim]
        value: torch.Tensor,  # [tokens, kv_heads, head_dim]
        attention_mask: None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: PackedBatch | None = None,
    ) -> torch.Tensor:
        """[tokens, heads · head_dim]"""
        batch = packed_seq_params
        query, key = (Rotate.apply(x, batch.cos, batch.sin) for x in (query, key))
        longest = int(batch.lengths.max())
        if batch.split is None and longest < LONG and has_kernel(query):
            bounds = (batch.bounds, batch.bounds, longest, longest)
            out = varlen_attn(query, key, value, *bounds, scale=self.scale, window_size=_CAUSAL, **_SHARED_HEADS)
            return out.flatten(1)
        padded = batch.padded
        if batch.split is not None:
            parts = self._attend_across(query, key, value, padded, batch.split)
        else:
            if padded.slots is not None:
                query, key, value = (_Pad.apply(x, padded.slots, padded.place) for x in (query, key, value))
            parts = [self._attend(query, key, value, bucket) for bucket in padded.buckets]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if padded.place is None else _Unpad.apply(whole, padded.place)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """[rows · width, heads · head_dim]; padding stands at the end of a row, where no real token looks."""
        q, k, v = (_rows(x, bucket) for x in (query, key, value))
        grouped = q.size(1) != k.size(1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(bucket.rows * bucket.width, -1)

    def _attend_across(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padded: Padded, split: Split
    ) -> list[torch.Tensor]:
        """The same with context parallelism: this rank's queries, the keys and values of all ranks."""
        group = parallel_state.get_context_parallel_group()
        everywhere = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
        key, value = (_Pad.apply(x, split.slots, split.place) for x in everywhere)
        if padded.slots is not None:
            query = _Pad.apply(query, padded.slots, padded.place)
        parts = []
        for here, there, positions in zip(padded.buckets, split.buckets, split.positions, strict=True):
            q, k, v = _rows(query, here), _rows(key, there), _rows(value, there)
            seen = torch.arange(there.width, device=q.device) <= positions[:, None, :, None]
            grouped = q.size(1) != k.size(1)
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=grouped)
            parts.append(out.transpose(1, 2).reshape(here.rows * here.width, -1))
        return parts


def has_kernel(query: torch.Tensor) -> bool:
    """Whether torch's kernel for rows of any length takes such heads."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.size(-1) in range(8, 257, 8)


def _rows(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """[slots, heads, head_dim] -> [rows, heads, width, head_dim]"""
    part = x[bucket.start : bucket.start + bucket.rows * bucket.width]
    return part.unflatten(0, (bucket.rows, bucket.width)).transpose(1, 2)


class _Pad(torch.autograd.Function):
    """x[slots]. A slot that repeats a token gets no gradient (nothing real reads it), so backward is a gather too."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, slots: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """padded[place]: the slots of real tokens, each exactly once."""

    @staticmethod
    def forward(ctx: object, padded: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.shape = padded.shape
        return padded.index_select(0, place)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None
