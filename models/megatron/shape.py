"""The shape of a model, read from a Hugging Face config.json: what Megatron must be told to build the same one."""

import json
from dataclasses import dataclass
from pathlib import Path

CONFIG_FILE = "config.json"
_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding; the last four are those of Llama 3's frequency scaling (factor 1: none)."""

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class Experts:
    """A mixture in every layer, whose router picks `active` of `total` experts for each token."""

    total: int
    active: int
    normed: bool  # the picked ones' weights add up to 1


@dataclass(frozen=True)
class ModelShape:
    family: str  # llama, qwen2, qwen3 or qwen3_moe
    layers: int
    hidden: int
    ffn: int  # of each expert, if there are any
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool  # the output head is the embedding
    rope: Rope
    experts: Experts | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    @classmethod
    def from_hf(cls, folder: Path) -> "ModelShape":
        """Reads `folder`/config.json. Raises ValueError, naming the field, for what this mapping cannot represent."""
        path = Path(folder) / CONFIG_FILE
        config = json.loads(path.read_text())
        family = config["model_type"]
        if family not in _FAMILIES:
            raise ValueError(f"{path}: model_type {family!r}; supported are {', '.join(_FAMILIES)}")
        _refuse_variants(path, config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        experts = _experts(path, config) if family == "qwen3_moe" else None
        return cls(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            ffn=config["moe_intermediate_size" if experts else "intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            context=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            tied=config.get("tie_word_embeddings", False),
            rope=_rope(path, config),
            experts=experts,
        )


def _refuse_variants(path: Path, config: dict) -> None:
    """Options of these families that change the computation and that no model we support uses."""
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(f"{path}: {name} {config[name]!r} is not supported, only {value!r}")
    if "quantization_config" in config:
        raise ValueError(f"{path}: quantization_config: quantised weights cannot be trained; use the original model")


def _experts(path: Path, config: dict) -> Experts:
    """transformers 5 writes `num_local_experts`, older versions `num_experts`."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{path}: mlp_only_layers, decoder_sparse_step: only models with experts in every layer")
    total = config.get("num_local_experts") or config["num_experts"]
    return Experts(total, config["num_experts_per_tok"], config.get("norm_topk_prob", False))


def _rope(path: Path, config: dict) -> Rope:
    """transformers 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise ValueError(f"{path}: rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    scaling = [rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor")]
    return Rope(theta, *map(float, scaling), original_context=rope["original_max_position_embeddings"])
