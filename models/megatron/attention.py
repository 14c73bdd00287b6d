"""Causal attention over packed rows with torch's SDPA: one call per bucket of similar lengths, none per row."""

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from models.megatron.batch import Bucket, PackedBatch
from models.megatron.rotary import Rotate


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
        if batch.slots is not None:
            query, key, value = (_Pad.apply(x, batch.slots, batch.place) for x in (query, key, value))
        parts = [self._attend(query, key, value, bucket) for bucket in batch.buckets]
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        return padded if batch.place is None else _Unpad.apply(padded, batch.place)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """[rows · width, heads · head_dim]; padding stands at the end of a row, where no real token looks."""
        rows, width = bucket.rows, bucket.width
        q, k, v = (
            x[bucket.start : bucket.start + rows * width].unflatten(0, (rows, width)).transpose(1, 2)
            for x in (query, key, value)
        )
        grouped = q.size(1) != k.size(1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(rows * width, -1)


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
