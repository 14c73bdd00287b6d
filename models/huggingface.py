"""Looks a Hugging Face model folder over before anything is computed with it."""

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from models.folder import FolderConfig, FolderError, read_config
from models.tokenizer import Tokenizer
from models.weights import HEAD, weight_files

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class FolderReport:
    """What the folder holds; every number is read from its files, none assumed."""

    family: str  # Qwen2.5, Qwen3, Llama
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
    headers = _headers(folder)
    if not config.tied and HEAD not in headers:
        raise FolderError(f"{folder}: no {HEAD}, and tie_word_embeddings is false; set it to true, or add the tensor")
    counted = {name: shape for name, (_, shape) in headers.items() if not (config.tied and name == HEAD)}
    return FolderReport(
        family=config.family,
        architecture=config.architecture,
        parameters=sum(math.prod(shape) for shape in counted.values()),
        vocab=config.vocab,
        context=config.context,
        tied=config.tied,
        dtype=_dtype(folder, headers),
        eos_ids=tokenizer.eos_ids,
        tokenizer_digest=tokenizer.digest,
        template_digest=tokenizer.template_digest,
    )


def _require_vocab(folder: Path, config: FolderConfig, tokenizer: Tokenizer) -> None:
    largest = max(len(tokenizer) - 1, *tokenizer.eos_ids)
    if largest >= config.vocab:
        raise FolderError(
            f"{folder}: the tokenizer has token id {largest}, the model {config.vocab} embeddings; ids must be below: "
            "take tokenizer and weights from one model"
        )


def _headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Tensor name -> (dtype as safetensors writes it, shape), over all shards."""
    try:
        files = weight_files(folder)
    except FileNotFoundError as error:
        raise FolderError(str(error)) from error
    return {name: entry for path in files for name, entry in _header(path).items()}


def _header(path: Path) -> dict[str, tuple[str, list[int]]]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118: safe_open is no mapping
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except SafetensorError as error:
        raise FolderError(f"{path}: not a readable safetensors file ({error}); copy it again") from error


def _dtype(folder: Path, headers: dict[str, tuple[str, list[int]]]) -> str:
    found = sorted({dtype for dtype, _ in headers.values()})
    if len(found) != 1 or found[0] not in DTYPES:
        raise FolderError(f"{folder}: weights of type {found}; all must be one of {list(DTYPES)}: convert the model")
    return DTYPES[found[0]]
