"""Looks a Hugging Face model folder over before anything is computed with it."""

import math
from dataclasses import dataclass
from pathlib import Path

from models.folder import FolderConfig, FolderError, read_config
from models.tokenizer import Tokenizer
from models.weights import HEAD, stored_dtype, stored_shapes


@dataclass(frozen=True)
class FolderReport:
    """What the folder holds; every number is read from its files, none assumed."""

    family: str  # Qwen2.5, Qwen3, Qwen3-MoE, Llama
    architecture: str
    parameters: int  # a tied head counts once
    vocab: int  # rows of the embedding
    context: int
    tied: bool
    dtype: str  # of the stored weights
    eos_ids: tuple[int, ...]
    tokenizer_digest: str
    template_digest: str


def inspect(folder: Path) -> FolderReport:
    """Config, weights' headers and tokenizer of a folder; no tensor is read.

    Raises FolderError, with value, rule and fix, for an unknown family, a missing config, tokenizer, eos token, chat
    template, weights file or head, weights that are not of one float type, and a tokenizer larger than the embedding.
    """
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = Tokenizer(folder)
    _require_vocab(folder, config, tokenizer)
    dtype, shapes = _weights(folder, config)
    return FolderReport(
        family=config.family,
        architecture=config.architecture,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        vocab=config.vocab,
        context=config.context,
        tied=config.tied,
        dtype=dtype,
        eos_ids=tokenizer.eos_ids,
        tokenizer_digest=tokenizer.digest,
        template_digest=tokenizer.template_digest,
    )


def _weights(folder: Path, config: FolderConfig) -> tuple[str, dict[str, tuple[int, ...]]]:
    """dtype, and shape by tensor name, less a tied head."""
    try:
        dtype, shapes = stored_dtype(folder), stored_shapes(folder)
    except (FileNotFoundError, ValueError) as error:
        raise FolderError(str(error)) from error
    if not config.tied and HEAD not in shapes:
        raise FolderError(f"{folder}: no {HEAD}, and tie_word_embeddings is false; set it to true, or add the tensor")
    return dtype, {name: shape for name, shape in shapes.items() if not (config.tied and name == HEAD)}


def _require_vocab(folder: Path, config: FolderConfig, tokenizer: Tokenizer) -> None:
    largest = max(len(tokenizer) - 1, *tokenizer.eos_ids)
    if largest >= config.vocab:
        raise FolderError(
            f"{folder}: the tokenizer has token id {largest}, the model {config.vocab} embeddings; ids must be below: "
            "take tokenizer and weights from one model"
        )
