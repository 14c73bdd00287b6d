"""Where artifacts live: any fsspec URL. Files are written once; conditional create decides who wins a race."""

import contextlib
import errno
import hashlib
import os
import posixpath
import shutil
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from data.files import HashingFile, check_local, missing
from data.manifest import FileEntry

PRECONDITION_FAILED = 412


class StoreError(OSError):
    """The store cannot be read or written; the message names the address, the reason and the fix."""


@dataclass(frozen=True)
class Store:
    """A root folder by URL (a plain path is a file:// URL). Paths given to its methods are relative to the root.

    Raises StoreError for a URL that no installed file system understands.
    """

    url: str
    storage_options: dict[str, str | int | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            filesystem, root = url_to_fs(self.url, **self.storage_options)
        except (ValueError, ImportError) as error:
            raise StoreError(f"store {self.url!r}: {error}; use file://, s3:// or another fsspec URL") from None
        object.__setattr__(self, "url", filesystem.unstrip_protocol(root).rstrip("/"))

    @cached_property
    def _opened(self) -> tuple[AbstractFileSystem, str]:
        filesystem, root = url_to_fs(self.url, **self.storage_options)
        return filesystem, root.rstrip("/")

    def __getstate__(self) -> dict[str, object]:
        """Only what it is made from: connections do not travel."""
        return {"url": self.url, "storage_options": self.storage_options}

    @property
    def local(self) -> bool:
        return self.url.startswith("file://")

    def url_of(self, path: str) -> str:
        return f"{self.url}/{path}"

    def path_of(self, uri: str) -> str:
        """Inverse of url_of. Raises StoreError for an address outside this store."""
        if not uri.startswith(f"{self.url}/"):
            raise StoreError(f"{uri}: not in the store {self.url}; open the store that holds it")
        return uri[len(self.url) + 1 :]

    def exists(self, path: str) -> bool:
        filesystem, root = self._opened
        filesystem.invalidate_cache()
        return bool(filesystem.exists(f"{root}/{path}"))

    def read_bytes(self, path: str) -> bytes:
        """Raises FileNotFoundError for a file that is not there, StoreError for one that cannot be read."""
        filesystem, root = self._opened
        try:
            return filesystem.cat_file(f"{root}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{self.url_of(path)}: no such file") from None
        except OSError as error:
            raise self._refused(path, "read", error) from error

    def open_buffer(self, path: str) -> pa.Buffer:
        """A file's bytes; a local file is mapped, not copied. Errors as read_bytes."""
        if not self.local:
            return pa.py_buffer(self.read_bytes(path))
        target = self._local(path)
        if not target.is_file():
            raise FileNotFoundError(f"{self.url_of(path)}: no such file")
        if target.stat().st_size == 0:  # cannot be mapped
            return pa.py_buffer(b"")
        with pa.memory_map(str(target)) as mapped:
            return mapped.read_buffer()

    def list_dirs(self, path: str = "") -> list[str]:
        """Names of the folders in a folder, sorted; none if it is not there."""
        filesystem, root = self._opened
        filesystem.invalidate_cache()
        try:
            found = filesystem.ls(posixpath.join(root, path).rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(posixpath.basename(e["name"].rstrip("/")) for e in found if e["type"] == "directory")

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless one is there: True if this call did. One of many wins; a kill leaves all or none."""
        with self._writing(path):
            return self._link(path, data) if self.local else self._put_if_absent(path, data)

    @contextlib.contextmanager
    def open_new(self, path: str) -> Generator[HashingFile]:
        """A new file to write, hashed on the way and on disk when the block ends. Raises StoreError if it exists."""
        filesystem, root = self._opened
        with self._writing(path):
            if self.local:
                _make_folders(self._local(path).parent)
            with filesystem.open(f"{root}/{path}", "xb") as raw:
                yield (file := HashingFile(raw))
                file.flush()
                if self.local:
                    os.fsync(raw.fileno())
            if self.local:
                _sync_folder(self._local(path).parent)

    def check_writable(self) -> None:
        """Write and remove a small file. Raises StoreError with the reason and the fix."""
        path = f".probe-{uuid.uuid4().hex}"
        self.create(path, b"rollbook")
        filesystem, root = self._opened
        with self._writing(path):
            filesystem.rm_file(f"{root}/{path}")

    def local_copy(self, entries: Sequence[FileEntry], cache: Path) -> Path:
        """A local folder that holds the files of one manifest under their names, each checked by size and SHA-256.

        A local store gives the folder in place, others a copy below `cache`. Raises ManifestError, naming the file,
        for one that is missing or altered, and ValueError for no entries.
        """
        if not entries:
            raise ValueError("local_copy: no files; the manifest lists none")
        if self.local:
            for entry in entries:
                check_local(self._local(self.path_of(entry.uri)), entry)
            first = entries[0]
            return self._local(self.path_of(first.uri).removesuffix(f"/{first.name}"))
        folder = cache / hashlib.sha256("\n".join(sorted(f"{e.sha256} {e.name}" for e in entries)).encode()).hexdigest()
        if not folder.is_dir():
            self._download(entries, folder)
        for entry in entries:
            check_local(folder / entry.name, entry)
        return folder

    def _download(self, entries: Sequence[FileEntry], folder: Path) -> None:
        """All files into a folder beside, which then takes the name: a killed download leaves no half copy."""
        filesystem, root = self._opened
        beside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part")
        for entry in entries:
            target = beside / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                filesystem.get_file(f"{root}/{self.path_of(entry.uri)}", str(target))
            except FileNotFoundError:
                raise missing(entry) from None
        try:
            beside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(beside)  # another process was faster with the same files

    def _local(self, path: str) -> Path:
        return Path(self._opened[1]) / path

    def _link(self, path: str, data: bytes) -> bool:
        """An exclusive open of the final path is not kill-safe: it could leave half a file there. A link cannot."""
        target = self._local(path)
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

    def _put_if_absent(self, path: str, data: bytes) -> bool:
        filesystem, root = self._opened
        try:
            filesystem.pipe_file(f"{root}/{path}", data, mode="create")
        except FileExistsError:
            if not filesystem.exists(f"{root}/{path}"):
                raise  # a file in the way of a folder
            return False
        except OSError as error:
            if _http_status(error) == PRECONDITION_FAILED:
                return False
            raise
        return True

    @contextlib.contextmanager
    def _writing(self, path: str) -> Generator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise self._refused(path, "written", error) from error

    def _refused(self, path: str, what: str, error: OSError) -> StoreError:
        reason = error.strerror or str(error) or type(error).__name__
        return StoreError(
            f"store {self.url}: {path} cannot be {what} ({reason}); set resources.store to a place that you can write, "
            "and check that no file is where a folder must be"
        )


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


def _http_status(error: BaseException) -> int | None:
    """Some servers answer a lost race with EINVAL; the HTTP status is in the botocore error that caused it."""
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
