"""Named tensors in safetensors files, and the digest that says which weights somebody holds."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from models.pieces import flat_bytes, hash_pieces
from models.upload import upload

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names -> torch's
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class WeightsMismatch(ValueError):
    """Weights that are not the ones asked for."""


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 (hex) over each tensor's name, dtype, shape and the sha256 of each piece of its bytes, by name.

    A piece has models.pieces.PIECE bytes. Independent of file layout, shards, device and memory layout. An output head
    equal to the embedding is left out, so that a tied model has one digest whether the head is listed or not.
    """
    digest, named = hashlib.sha256(), dict(sorted(without_tied_head(tensors).items()))
    for (name, tensor), pieces in zip(named.items(), hash_pieces(list(named.values())), strict=True):
        header = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(json.dumps(header).encode() + b"\n" + b"".join(pieces))
    return digest.hexdigest()


def without_tied_head(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, less an output head whose values are the embedding's."""
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    tied = head is not None and embedding is not None and _same(head, embedding)
    return {name: tensor for name, tensor in tensors.items() if not (tied and name == HEAD)}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # By bytes: NaN weights must not make a tied head look untied.
    return torch.equal(flat_bytes(a), flat_bytes(b))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: one file, or the shards that its index names.

    Raises FileNotFoundError if there is neither, or if a shard is missing.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise FileNotFoundError(
            f"{folder}: no {WEIGHTS_FILE} and no {INDEX_FILE}; weights must be safetensors: "
            "convert others with model.save_pretrained(folder)"
        )
    weight_map: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    files = [folder / name for name in sorted(set(weight_map.values()))]
    if missing := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{folder}: {INDEX_FILE} names {missing}, which are not there; copy every shard")
    return files


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, over all shards, from the files' headers alone."""
    return {name: shape for name, (_, shape) in _headers(folder).items()}


def stored_dtype(folder: Path) -> str:
    """The one float type of the stored weights, as torch names it. Raises ValueError for several or another type."""
    found = sorted({dtype for dtype, _ in _headers(folder).values()})
    if len(found) != 1 or found[0] not in FLOAT_TYPES:
        raise ValueError(
            f"{folder}: weights of type {found}; all must be one of {list(FLOAT_TYPES)}: convert the model"
        )
    return FLOAT_TYPES[found[0]]


def _headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: entry for path in weight_files(folder) for name, entry in _header(path).items()}


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise _broken(path, error) from error


def read_tensors(folder: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder, in the file's dtype. Raises ValueError for a broken file.

    The tensors are copies: safetensors maps the file into memory, and whoever wrote to it would change them.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            if device == "cpu":
                tensors |= {name: tensor.clone() for name, tensor in load_file(path).items()}
            else:
                _header(path)  # refuses a broken file
                tensors |= upload(path, device, FLOAT_TYPES)
        except SafetensorError as error:
            raise _broken(path, error) from error
    return tensors


def _broken(path: Path, error: SafetensorError) -> ValueError:
    return ValueError(f"{path}: not a readable safetensors file ({error}); copy it again")


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Writes model.safetensors into `folder` (the same tensors give the same bytes) and returns their digest.

    A file that was there is replaced as a whole, so that a process that has it mapped keeps the old bytes.
    """
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in without_tied_head(tensors).items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    partial = Path(folder) / f"{WEIGHTS_FILE}.partial"
    save_file(kept, partial, metadata={"format": "pt"})
    partial.replace(Path(folder) / WEIGHTS_FILE)
    return tensors_digest(kept)


def require_digest(holder: str, got: str, wanted: str) -> None:
    """Raises WeightsMismatch unless the two digests are equal."""
    if got != wanted:
        raise WeightsMismatch(f"{holder}: weights of digest {got} where {wanted} is wanted; publish that policy again")
