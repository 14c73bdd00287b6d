"""Hugging Face names and layouts ⇄ Megatron's, bit for bit in both directions (of whole tensors).

Megatron fuses q, k and v, interleaved per key-value group, and stacks gate over up in the first layer of each MLP.
"""

from collections.abc import Iterator, Mapping

import torch

from models.megatron.shape import ModelShape

Tensors = dict[str, torch.Tensor]
_EMBEDDING = ("embedding.word_embeddings.weight", "model.embed_tokens.weight")
_FINAL_NORM = ("decoder.final_layernorm.weight", "model.norm.weight")
_HEAD = ("output_layer.weight", "lm_head.weight")
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}
_ROUTER = {"mlp.router.weight": "mlp.gate.weight"}
_QK_NORM = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


def to_megatron(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> Tensors:
    """The tensors of a Hugging Face folder under Megatron's names.

    Raises ValueError, naming them, if tensors are missing or left over.
    """
    needed = set(hf_names(shape))
    ignored = {_HEAD[1]} if shape.tied else set()
    if missing := sorted(needed - set(tensors)):
        raise ValueError(f"the model lacks {missing[:3]} ({len(missing)} tensors); its config.json asks for them")
    if extra := sorted(set(tensors) - needed - ignored):
        raise ValueError(f"the model has {extra[:3]} ({len(extra)} tensors), for which a {shape.family} has no place")
    out = {ours: tensors[theirs] for ours, theirs in _plain(shape)}
    for i in range(shape.layers):
        ours, theirs = _prefixes(i)
        for kind in _qkv_kinds(shape):
            parts = [tensors[f"{theirs}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            out[f"{ours}self_attention.linear_qkv.{kind}"] = _fuse_qkv(*parts, shape)
        for mine, other in _mlps(shape):
            gate_and_up = [tensors[f"{theirs}{other}{x}_proj.weight"] for x in ("gate", "up")]
            out[f"{ours}{mine}linear_fc1.weight"] = torch.cat(gate_and_up)
    return out


def to_hf(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> Tensors:
    """The inverse of `to_megatron`; a tied model has no lm_head."""
    out = {theirs: tensors[ours] for ours, theirs in _plain(shape)}
    for i in range(shape.layers):
        ours, theirs = _prefixes(i)
        for kind in _qkv_kinds(shape):
            parts = _split_qkv(tensors[f"{ours}self_attention.linear_qkv.{kind}"], shape)
            out |= {f"{theirs}self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", parts, strict=True)}
        for mine, other in _mlps(shape):
            gate, up = tensors[f"{ours}{mine}linear_fc1.weight"].chunk(2)
            out |= {f"{theirs}{other}gate_proj.weight": gate, f"{theirs}{other}up_proj.weight": up}
    return out


def hf_names(shape: ModelShape) -> Iterator[str]:
    """Every tensor that a Hugging Face folder of this shape must hold."""
    yield from (theirs for _, theirs in _plain(shape))
    for i in range(shape.layers):
        _, theirs = _prefixes(i)
        yield from (f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv" for kind in _qkv_kinds(shape))
        yield from (f"{theirs}{other}{x}_proj.weight" for _, other in _mlps(shape) for x in ("gate", "up"))


def _plain(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """(Megatron's name, theirs) of the tensors that are the same in both."""
    yield from (_EMBEDDING, _FINAL_NORM)
    if not shape.tied:
        yield _HEAD
    per_layer = _LAYER | (_QK_NORM if shape.qk_norm else {}) | (_ROUTER if shape.experts else {})
    per_layer |= {f"{mine}linear_fc2.weight": f"{other}down_proj.weight" for mine, other in _mlps(shape)}
    for i in range(shape.layers):
        ours, theirs = _prefixes(i)
        yield from ((ours + a, theirs + b) for a, b in per_layer.items())


def _mlps(shape: ModelShape) -> list[tuple[str, str]]:
    """(Megatron's prefix, theirs) of the MLPs in one layer."""
    if shape.experts is None:
        return [("mlp.", "mlp.")]
    return [(f"mlp.experts.local_experts.{i}.", f"mlp.experts.{i}.") for i in range(shape.experts.total)]


def _prefixes(layer: int) -> tuple[str, str]:
    return f"decoder.layers.{layer}.", f"model.layers.{layer}."


def _qkv_kinds(shape: ModelShape) -> tuple[str, ...]:
    return ("weight", "bias") if shape.qkv_bias else ("weight",)


def _fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Rows of q [heads · d, …], k and v [kv_heads · d, …] -> per group: its queries, its key, its value."""
    groups = [x.unflatten(0, (shape.kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _split_qkv(fused: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    queries = shape.heads // shape.kv_heads * shape.head_dim
    groups = fused.unflatten(0, (shape.kv_heads, -1)).split([queries, shape.head_dim, shape.head_dim], dim=1)
    return [x.flatten(0, 1) for x in groups]
