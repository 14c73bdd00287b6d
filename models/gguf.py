"""A .gguf file as a Hugging Face folder: transformers unpacks the weights, the tokenizer is built from the metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from models.folder import FolderError
from models.sources import GGUF_DTYPE
from models.weights import write_tensors

ARCHITECTURE = "llama"
SPLITS = "smollm"  # llama.cpp's name of how the text is cut before BPE: digit by digit, then as GPT-2 does
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

Metadata = Mapping[str, Any]


def write_unpacked(file: Path, folder: Path) -> None:
    """Writes config, weights (bfloat16), tokenizer and chat template of a .gguf file into `folder`.

    Raises FolderError, with the fix, for an architecture or tokenizer that is not known here.
    """
    metadata = {name: field.contents() for name, field in GGUFReader(file).fields.items()}
    _require(file, metadata, "general.architecture", ARCHITECTURE)
    _require(file, metadata, "tokenizer.ggml.model", "gpt2")
    _require(file, metadata, "tokenizer.ggml.pre", SPLITS)
    _tokenizer(metadata).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    dtype = getattr(torch, GGUF_DTYPE)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    if hasattr(model.config, "quantization_config"):  # newer versions note where the weights came from
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_tensors(folder, {name: tensor.to(dtype) for name, tensor in model.state_dict().items()})


def _require(file: Path, metadata: Metadata, name: str, wanted: str) -> None:
    if metadata.get(name) != wanted:
        raise FolderError(
            f"{file}: {name} is {metadata.get(name)!r}, only {wanted!r} is known here; "
            "give the model's Hugging Face folder"
        )


def _tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast:
    """Built here: transformers' own reading cuts no number into digits, and in 5.12 takes the wrong eos_token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    built = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    built.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in ROLES.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=metadata[f"{ARCHITECTURE}.context_length"],
        clean_up_tokenization_spaces=False,
        **{role: tokens[index] for role, index in ids.items() if index is not None},
    )
