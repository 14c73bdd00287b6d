"""How bytes get in and out of a kind of place. `data.store` gives addresses, one kind of error and verified copies."""

import contextlib
import errno
import os
import posixpath
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem

from data.files import Sink

DIFFERENT_THERE = "other bytes are there already, and what is stored is never replaced"

ANOTHER_PLACE = "set resources.store to a place that you can write, and check that no file is where a folder must be"
MORE_ROOM = "make room on that disk; the same command then goes on"
PERMISSION = "give back the right to write there, and the same command goes on; or set resources.store to another place"
FIXES = {
    errno.ENOSPC: MORE_ROOM,
    errno.EDQUOT: MORE_ROOM,
    errno.EROFS: PERMISSION,
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
}


@dataclass(frozen=True)
class StoredFile:
    """A file as a listing has it."""

    path: str
    bytes: int
    modified: float  # seconds since the epoch


class Backend:
    """Any fsspec file system, such as memory://. Paths are relative to the root."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, filesystem: AbstractFileSystem, root: str) -> None:
        self.filesystem, self.root = filesystem, root.rstrip("/")

    def at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def exists(self, path: str) -> bool:
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(self.at(path)))

    def size(self, path: str) -> int:
        self.filesystem.invalidate_cache()
        return int(self.filesystem.size(self.at(path)))

    def read(self, path: str, version: str | None = None, span: tuple[int, int] | None = None) -> bytes:
        """A file's bytes, or those from span[0] up to span[1]. Raises FileNotFoundError."""
        start, stop = span or (None, None)
        return self.filesystem.cat_file(self.at(path), start=start, end=stop)

    def buffer(self, path: str, version: str | None = None) -> pa.Buffer:
        return pa.py_buffer(self.read(path, version))

    def list_dirs(self, path: str) -> list[str]:
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.ls(posixpath.join(self.root, path).rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [posixpath.basename(e["name"].rstrip("/")) for e in found if e["type"] == "directory"]

    def list_files(self, path: str) -> list[StoredFile]:
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.find(posixpath.join(self.root, path).rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            StoredFile(name.removeprefix(f"{self.root}/"), int(about["size"]), _modified(about))
            for name, about in found.items()
        ]

    def create(self, path: str, data: bytes) -> bool:
        """All or none of the bytes, unless something is there: then False. One of many wins."""
        try:
            self.filesystem.pipe_file(self.at(path), data, mode="create")
        except FileExistsError:
            if not self.filesystem.exists(self.at(path)):
                raise  # a file in the way of a folder
            return False
        return True

    @contextlib.contextmanager
    def writing(self, path: str) -> Generator[Sink]:
        """A new file, there when the block ends. Raises FileExistsError if something is there."""
        with self.filesystem.open(self.at(path), "xb") as file:
            yield file

    def version_of(self, file: Sink) -> str | None:
        """The version that the place gave to a file just written, if it keeps versions."""
        return None

    def remove(self, path: str) -> None:
        self.filesystem.rm_file(self.at(path))

    def fetch(self, path: str, version: str | None, target: Path) -> None:
        """Copy to a local file. Raises FileNotFoundError."""
        self.filesystem.get_file(self.at(path), str(target))

    def check(self) -> None:
        """Raises one of `failures` for what can be known before writing."""

    def explain(self, error: BaseException) -> tuple[str, str]:
        """What went wrong in few words, and what to do."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return reason, FIXES.get(getattr(error, "errno", None), ANOTHER_PLACE)


def _modified(about: Mapping[str, Any]) -> float:
    """Local files have the one, those in memory the other."""
    found = about["mtime"] if "mtime" in about else about["created"]
    return found.timestamp() if isinstance(found, datetime) else float(found)


class LocalBackend(Backend):
    """A folder: files are synced, and appear at their place whole."""

    def local(self, path: str) -> Path:
        return Path(self.root) / path

    def buffer(self, path: str, version: str | None = None) -> pa.Buffer:
        """Mapped, not copied."""
        target = self.local(path)
        if not target.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file")
        if target.stat().st_size == 0:  # cannot be mapped
            return pa.py_buffer(b"")
        with pa.memory_map(str(target)) as mapped:
            return mapped.read_buffer()

    def create(self, path: str, data: bytes) -> bool:
        """An exclusive open of the final path is not kill-safe: it could leave half a file there. A link cannot."""
        target = self.local(path)
        _make_folders(target.parent)
        beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(beside, target)
        except FileExistsError:
            return False
        finally:
            beside.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return True

    def remove(self, path: str) -> None:
        target = self.local(path)
        target.unlink()
        for folder in target.relative_to(self.root).parents:
            with contextlib.suppress(OSError):  # it has other files
                if folder.name:
                    self.local(str(folder)).rmdir()

    @contextlib.contextmanager
    def writing(self, path: str) -> Generator[Sink]:
        target = self.local(path)
        _make_folders(target.parent)
        with target.open("xb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                target.unlink(missing_ok=True)  # half a file would take room on a disk that is perhaps full
                raise
        _sync_folder(target.parent)


def _make_folders(folder: Path) -> None:
    """mkdir -p that survives a power cut: each new name is synced in the folder above it."""
    new = []
    while not folder.exists():
        new.append(folder)
        folder = folder.parent
    for path in reversed(new):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
