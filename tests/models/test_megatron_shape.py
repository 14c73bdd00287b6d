"""What is read from a config.json, and what is refused."""

import json
from pathlib import Path

import pytest

from models.megatron.shape import Experts, ModelShape, Rope

QWEN2 = {  # Qwen2.5-0.5B's numbers
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "hidden_act": "silu",
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN2 | changes))
    return folder


def test_a_published_config(tmp_path: Path) -> None:
    shape = ModelShape.from_hf(write(tmp_path))
    # head_dim is not in the file: 896 / 14 = 64.
    assert shape == ModelShape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, 32768, 1e-6, True, Rope(1e6))
    assert shape.qkv_bias and not shape.qk_norm


def test_an_explicit_head_dim_and_missing_optional_fields(tmp_path: Path) -> None:
    shape = ModelShape.from_hf(
        write(tmp_path, model_type="qwen3", head_dim=128, num_key_value_heads=None, tie_word_embeddings=False)
    )
    assert (shape.head_dim, shape.kv_heads, shape.tied) == (128, 14, False)
    assert shape.qk_norm and not shape.qkv_bias


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts"])  # Qwen's files, transformers 5
def test_a_mixture_of_experts(tmp_path: Path, field: str) -> None:
    """The width is that of an expert."""
    mixture = {field: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    shape = ModelShape.from_hf(write(tmp_path, model_type="qwen3_moe", **mixture))
    assert (shape.experts, shape.ffn, shape.qk_norm) == (Experts(128, 8, True), 768, True)


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])  # transformers 5, transformers 4
def test_llama3_frequency_scaling(tmp_path: Path, field: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = ModelShape.from_hf(write(tmp_path, model_type="llama", rope_theta=500000.0, **{field: scaling}))
    assert shape.rope == Rope(500000.0, 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path: Path, change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelShape.from_hf(write(tmp_path, **change))
