"""A model of Qwen3-0.6B's shape with random bfloat16 weights, and a toy of the same family."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.weights import read_tensors, tensors_digest

FULL = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
TINY = FULL | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}


def write_model(folder: Path, sizes: dict[str, int], device: torch.device) -> str:
    """Returns the digest of its tensors."""
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(folder)
    return tensors_digest(read_tensors(folder))
