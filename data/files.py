"""Files by their bytes: hashed while they are written, checked against their manifest when they are read."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from data.digest import file_digest
from data.manifest import FileEntry, ManifestError


@dataclass(frozen=True)
class Written:
    """What a finished file is: SHA-256 of its bytes, their number, and its version where the store keeps versions."""

    sha256: str
    bytes: int
    version_id: str | None = None


class Sink(Protocol):
    """A binary file that is written from start to end."""

    def write(self, data: memoryview, /) -> int | None: ...

    def flush(self) -> None: ...


class HashingFile:
    """A sink that knows the SHA-256 and length of what went through it."""

    def __init__(self, raw: Sink) -> None:
        self._raw, self._sha256, self._bytes, self.closed = raw, hashlib.sha256(), 0, False
        self.version_id: str | None = None  # set by the store when the file is there

    def write(self, data: bytes | bytearray | memoryview | pa.Buffer) -> int:
        view = memoryview(data).cast("B")
        self._sha256.update(view)
        self._bytes += len(view)
        self._raw.write(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._raw.flush()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """The store closes the file itself."""

    @property
    def written(self) -> Written:
        return Written(self._sha256.hexdigest(), self._bytes, self.version_id)


def missing(entry: FileEntry) -> ManifestError:
    return ManifestError(f"{entry.uri}: missing, but a manifest lists it; restore the file, or rerun as a new run")


def check_size(actual: int, entry: FileEntry) -> None:
    if actual != entry.bytes:
        raise ManifestError(
            f"{entry.uri}: altered: {actual} bytes, the manifest says {entry.bytes}; restore the file, or rerun as a "
            "new run"
        )


def check_sha256(actual: str, entry: FileEntry) -> None:
    if actual != entry.sha256:
        raise ManifestError(
            f"{entry.uri}: altered: sha256 {actual}, the manifest says {entry.sha256}; restore the file, or rerun as "
            "a new run"
        )


def check_local(file: Path, entry: FileEntry, hashed: bool = True) -> None:
    """Raises ManifestError unless the local file, the entry's own or a copy, has the entry's size and SHA-256.

    hashed: False looks at its size only.
    """
    if not file.is_file():
        raise missing(entry)
    check_size(file.stat().st_size, entry)
    if hashed:
        check_sha256(file_digest(file), entry)
