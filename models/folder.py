"""What a Hugging Face folder's config.json says, and which model families are known here. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

FAMILIES = {
    "Qwen2ForCausalLM": "Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "LlamaForCausalLM": "Llama",
}
MODEL_TYPES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}


class FolderError(ValueError):
    """A model folder that cannot be used; the message names the folder, what is wrong with it and the fix."""


@dataclass(frozen=True)
class FolderConfig:
    architecture: str
    family: str
    vocab: int
    context: int  # tokens of prompt and answer together
    tied: bool


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises FolderError for a file that is missing or no JSON object."""
    if not path.is_file():
        raise FolderError(f"{path.parent}: no {path.name}; give a Hugging Face folder, as save_pretrained writes it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise FolderError(f"{path}: not JSON ({error}); copy the file again") from error
    if not isinstance(value, dict):
        raise FolderError(f"{path}: a JSON {type(value).__name__}; it must be an object")
    return value


def read_config(folder: Path) -> FolderConfig:
    """Reads config.json. Raises FolderError for an unknown family, a quantized model, or a missing or wrong number."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    architecture = _architecture(raw, path)
    if "quantization_config" in raw:
        raise FolderError(f"{path}: has a quantization_config; weights must be float: give the unquantized model")
    return FolderConfig(
        architecture=architecture,
        family=FAMILIES[architecture],
        vocab=_positive(raw, "vocab_size", path),
        context=_positive(raw, "max_position_embeddings", path),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _architecture(raw: dict[str, object], path: Path) -> str:
    listed = raw.get("architectures")
    model_type = raw.get("model_type")
    name = listed[0] if isinstance(listed, list) and listed else MODEL_TYPES.get(str(model_type), model_type)
    if name not in FAMILIES or MODEL_TYPES.get(str(model_type)) != name:
        known = ", ".join(f"{family} ({architecture})" for architecture, family in FAMILIES.items())
        raise FolderError(
            f"{path}: architecture {name!r} with model_type {model_type!r} is not supported; use one of {known}"
        )
    return str(name)


def _positive(raw: dict[str, object], name: str, path: Path) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FolderError(f"{path}: {name} is {value!r}; it must be a whole number of at least 1: correct config.json")
    return value
