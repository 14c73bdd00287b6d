"""The manifest: a small JSON file that says what a step made, of what, and how. It alone travels between tasks.

On disk, addresses inside the store are relative to its root, so that a store may be moved; in memory they are URIs.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError


class ManifestError(ValueError):
    """A manifest, or a file it names, is not what it should be; the message says which and what differs."""


class FileEntry(BaseModel):
    """One file of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # path below the attempt's folder
    uri: str
    version_id: str | None = None  # of the object store, if it keeps versions
    sha256: str  # of the bytes
    bytes: int
    rows: int | None = None  # tables only
    table: str | None = None  # kind of table; None for other files


class Manifest(BaseModel):
    """What one step made. Equal keys mean: the same step on the same content with the same settings."""

    # JSON has no NaN; a metric that is one, such as the mean of no reward, is the string "NaN" there.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    uri: str  # its own address
    kind: str  # of what was made: rollouts, rewards, policy, state, ...
    schema_version: int
    run: str | None  # None: shared by runs
    iteration: int | None
    step: str
    step_version: int
    key: str
    inputs: dict[str, str]  # name -> content digest
    config: dict[str, JsonValue]  # the semantic slice that the step read
    config_digest: str
    seed: int
    user_code: dict[str, str]  # name -> digest

    # Recorded, but outside the key.
    code_digest: str
    input_uris: dict[str, str]  # name -> manifest
    packages: dict[str, str]
    execution: dict[str, JsonValue]
    files: tuple[FileEntry, ...]
    content_digest: str
    metrics: dict[str, float]
    facts: dict[str, JsonValue]  # cursor, policy_version, tokenizer digest, ...
    seconds: float  # of the step itself
    created_at: datetime  # UTC
    parent: str | None = None  # the run it was forked from

    @property
    def policy_version(self) -> int:
        """How many optimizer updates lie behind a policy, or behind what was made with it. Raises ManifestError."""
        version = self.facts.get("policy_version")
        if not isinstance(version, int):
            raise ManifestError(f"{self.uri}: policy_version is {version!r}; it must be a count of optimizer updates")
        return version

    def to_bytes(self, root: str) -> bytes:
        """JSON with addresses below `root` made relative."""
        raw = json.loads(self.model_dump_json())
        return json.dumps(_with_addresses(raw, lambda uri: relative(uri, root)), indent=1).encode()


def from_bytes(data: bytes, uri: str, root: str) -> Manifest:
    """Parse a manifest found at `uri` in the store at `root`. Raises ManifestError, naming the address."""
    try:
        return Manifest.model_validate(_with_addresses(json.loads(data), lambda address: absolute(address, root)))
    except (ValidationError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(
            f"{uri}: not a manifest of this version of Rollbook ({_brief(error)}); it was altered or is from another "
            "version: restore it, or use another store"
        ) from None


def relative(uri: str, root: str) -> str:
    return uri.removeprefix(f"{root}/")


def absolute(address: str, root: str) -> str:
    return address if "://" in address else f"{root}/{address}"


def _with_addresses(raw: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return raw | {
        "uri": change(raw["uri"]),
        "input_uris": {name: change(uri) for name, uri in raw["input_uris"].items()},
        "files": [entry | {"uri": change(entry["uri"])} for entry in raw["files"]],
    }


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"
    return f"{type(error).__name__}: {error}"
