"""Which program made an artifact: a digest of our own source, and the versions of what it stands on."""

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

FOLDERS = ("flows", "tasks", "models", "infra", "data", "ops")
PACKAGES = (
    "megatron-core",
    "mlflow",
    "numba",
    "numpy",
    "prefect",
    "pyarrow",
    "ray",
    "rollbook",
    "sglang",
    "tokenizers",
    "torch",
    "transformers",
)


@cache
def code_digest() -> str:
    """SHA-256 over the names and bytes of Rollbook's Python files. Recorded, never in a key."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(
                f"{file.relative_to(root).as_posix()}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()
            )
    return digest.hexdigest()


@cache
def packages() -> dict[str, str]:
    """Version of each package that is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
