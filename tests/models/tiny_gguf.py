"""A tiny Llama as a .gguf file, written as llama.cpp writes one."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from tokenizers import pre_tokenizers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "1 2", "h i"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INNER, HEADS, KV_HEADS = 32, 64, 4, 2
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensors(tied: bool = True) -> dict[str, torch.Tensor]:
    """Float32, by Hugging Face's names: multiples of 1/16 from -8/16 to 7/16, which bfloat16 holds exactly.

    So do blocks of 32 values in four bits, since both ends are in each.
    """
    keys = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    shapes |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    named = {f"model.layers.0.{NAMES[name]}.weight": shape for name, shape in shapes.items()}
    named |= {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    named |= {} if tied else {"lm_head.weight": (len(TOKENS), HIDDEN)}
    random = torch.Generator().manual_seed(0)
    made = {name: torch.randint(-8, 8, shape, generator=random) / 16 for name, shape in named.items()}
    for tensor in made.values():
        tensor.view(-1, 32)[:, :2] = torch.tensor([-8, 7]) / 16
    return made


def write(file: Path, tied: bool = True, architecture: str = "llama", splits: str = "smollm") -> Path:
    """The matrices of the MLP in blocks of four bits, the others as they are."""
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    _add_tokenizer(writer, splits)
    ours = {f"model.layers.0.{theirs}.weight": f"blk.0.{short}" for short, theirs in NAMES.items()}
    ours |= {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    for name, tensor in tensors(tied).items():
        _add_tensor(writer, ours[name], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, splits: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray) -> None:
    """llama.cpp turns neighbouring rows of q and k together, Hugging Face those half a head apart."""
    if name.endswith(("attn_q", "attn_k")):
        heads = HEADS if name.endswith("attn_q") else KV_HEADS
        values = values.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values.shape).copy()
    kind = GGMLQuantizationType.Q4_1 if "ffn_" in name and values.ndim == 2 else None
    stored = values if kind is None else quantize(values, kind)
    writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
