"""The toy model "xs": a Qwen3 of 0.30 M parameters and a byte-level tokenizer, as an ordinary Hugging Face folder.

It learns the procedural tasks on two CPU cores. Its bytes depend on the seed alone: the weights come from the raw
Philox stream, the tokenizer from a fixed corpus, the JSON files from literals.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.weights import write_tensors

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = [PAD, IM_START, IM_END]  # ids 0, 1, 2: the turn structure; nobody's text may write them
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]  # plain words
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 512,
    "bos_token": None,
    "eos_token": IM_END,
    "pad_token": PAD,
    "clean_up_tokenization_spaces": False,
}

# What the procedural tasks and the template say often; each piece becomes one token where the vocabulary has room.
CORPUS = [
    "system\n",
    "user\n",
    "assistant\n",
    "Tools:\n",
    "Sort: ",
    "Count: ",
    "Answer: ",
    "What is ",
    "The answer is ",
    "\\boxed{",
    '\n{"name": "calculator", "arguments": {"expression": "',
    '"}}\n',
]


def write_toy(folder: Path, seed: int = 0) -> str:
    """Writes config, weights (float32), tokenizer and chat template into `folder`; returns the weights' digest.

    Two calls with one seed write equal bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 0})
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    (folder / "tokenizer.json").write_text(_tokenizer().to_str(pretty=True) + "\n", encoding="utf-8")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    return write_tensors(folder, _weights(seed))


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tokenizer() -> Tokenizer:
    """Byte-level BPE over the corpus: every byte is a token, digits never merge, there is no normalisation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - len(TAGS),
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for index in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _weights(seed: int) -> dict[str, torch.Tensor]:
    """Norms 1, matrices uniform with the standard deviation `initializer_range`.

    From raw Philox bits, whose stream is guaranteed, unlike that of a library's normal generator.
    """
    bits = np.random.Philox(key=seed)
    reach = CONFIG["initializer_range"] * np.sqrt(3.0)  # uniform on [-a, a] has the variance a^2/3
    tensors = {}
    for name, shape in _shapes().items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
            continue
        unit = (bits.random_raw(int(np.prod(shape))) >> np.uint64(11)) * 2.0**-53  # [0, 1)
        tensors[name] = torch.from_numpy(((2.0 * unit - 1.0) * reach).astype(np.float32).reshape(shape))
    return tensors
