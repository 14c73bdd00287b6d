"""Where artifacts live: any fsspec URL. Files are written once; conditional create decides who wins a race."""

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from data.addresses import StoreError, require_endpoint, require_no_secret
from data.backends import DIFFERENT_THERE, Backend, LocalBackend, StoredFile
from data.files import HashingFile, Written, check_local, missing
from data.manifest import FileEntry
from data.patience import PATIENCE_S

__all__ = ["Store", "StoreError", "StoredFile"]

READ_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Store:
    """A root folder by URL (a plain path is a file:// URL). Paths given to its methods are relative to the root.

    `endpoint` is the http(s):// address of an S3 service other than AWS, by default what AWS_ENDPOINT_URL says where
    the store is first made. Credentials are no part of a store: each process finds those of its machine. An S3 service
    that does not answer is asked again for `patience_s` seconds. Raises StoreError for a URL that no installed file
    system understands or that holds a secret.
    """

    url: str
    endpoint: str | None = None
    patience_s: float = field(default=PATIENCE_S, compare=False)

    def __post_init__(self) -> None:
        require_no_secret(self.url, "store")
        if self.url.startswith(("s3://", "s3a://")):
            from data.s3 import endpoint_of_environment

            object.__setattr__(self, "endpoint", self.endpoint or endpoint_of_environment())
        elif self.endpoint:
            raise StoreError(f"store endpoint {self.endpoint!r} with store {self.url!r}: only S3 has one; leave it out")
        if self.endpoint:
            require_endpoint(self.endpoint)
        try:
            filesystem, root = url_to_fs(self.url, **self._options)
        except (ValueError, ImportError) as error:
            raise StoreError(f"store {self.url!r}: {error}; use file://, s3:// or another fsspec URL") from None
        if not root.strip("/") and not self.local:
            raise StoreError(f"store {self.url!r}: names no bucket; write s3://bucket/prefix")
        object.__setattr__(self, "url", filesystem.unstrip_protocol(root).rstrip("/"))

    @property
    def _options(self) -> dict[str, Any]:
        if not self.url.startswith(("s3://", "s3a://")):
            return {}
        return {"endpoint_url": self.endpoint, "config_kwargs": {"retries": {"total_max_attempts": 1}}}  # ours instead

    @cached_property
    def _backend(self) -> Backend:
        filesystem, root = url_to_fs(self.url, **self._options)
        if self.local:
            return LocalBackend(filesystem, root)
        if not self.url.startswith("s3://"):
            return Backend(filesystem, root)
        from data.s3 import S3Backend

        return S3Backend(filesystem, root, self.url, self.patience_s)

    def __getstate__(self) -> dict[str, object]:
        """Only what it is made from: connections do not travel."""
        return {"url": self.url, "endpoint": self.endpoint, "patience_s": self.patience_s}

    @property
    def local(self) -> bool:
        return self.url.startswith("file://") or "://" not in self.url

    @property
    def filesystem(self) -> AbstractFileSystem:
        """For libraries that read through fsspec by themselves."""
        return self._backend.filesystem

    def url_of(self, path: str) -> str:
        return f"{self.url}/{path}"

    def path_of(self, uri: str) -> str:
        """Inverse of url_of. Raises StoreError for an address outside this store."""
        if not uri.startswith(f"{self.url}/"):
            raise StoreError(f"{uri}: not in the store {self.url}; open the store that holds it")
        return uri[len(self.url) + 1 :]

    def exists(self, path: str) -> bool:
        with self._asking(path, "read"):
            return self._backend.exists(path)

    def read_bytes(self, path: str) -> bytes:
        """Raises FileNotFoundError for a file that is not there, StoreError for one that cannot be read."""
        with self._reading(path):
            return self._backend.read(path)

    def open_buffer(self, path: str, version: str | None = None) -> pa.Buffer:
        """A file's bytes; a local file is mapped, not copied. Errors as read_bytes."""
        with self._reading(path):
            return self._backend.buffer(path, version)

    def read_span(self, path: str, start: int, stop: int, version: str | None = None) -> bytes:
        """The bytes from `start` up to `stop`, fewer at the file's end. Errors as read_bytes."""
        with self._reading(path):
            return self._backend.read(path, version, (start, stop))

    def list_dirs(self, path: str = "") -> list[str]:
        """Names of the folders in a folder, sorted; none if it is not there."""
        with self._asking(path or "the root", "listed"):
            return sorted(self._backend.list_dirs(path))

    def list_files(self, path: str = "") -> list[StoredFile]:
        """Every file below a folder, sorted by path; none if it is not there."""
        with self._asking(path or "the root", "listed"):
            return sorted(self._backend.list_files(path), key=lambda file: file.path)

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless one is there: True if this call did. One of many wins; a kill leaves all or none."""
        with self._asking(path, "written"):
            return self._backend.create(path, data)

    @contextlib.contextmanager
    def open_new(self, path: str) -> Generator[HashingFile]:
        """A new file to write, hashed on the way and stored when the block ends.

        Raises StoreError if one with other bytes is there.
        """
        file: HashingFile | None = None
        with self._asking(path, "written"):
            try:
                with self._backend.writing(path) as raw:
                    file = HashingFile(raw)
                    yield file
                    file.flush()
                file.version_id = self._backend.version_of(raw)
            except FileExistsError as error:
                if file is None or not self._holds(path, file.written):
                    raise OSError(errno.EEXIST, DIFFERENT_THERE) from error

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files, and the folders that this leaves empty. What is not there is no error."""
        for path in paths:
            with self._asking(path, "removed"), contextlib.suppress(FileNotFoundError):
                self._backend.remove(path)

    def check_writable(self) -> None:
        """Write and remove a small file. Raises StoreError with the reason and the fix."""
        path = f".probe-{uuid.uuid4().hex}"
        with self._asking(path, "written"):
            self._backend.check()
            self._backend.create(path, b"rollbook")
            self._backend.remove(path)

    def local_copy(self, entries: Sequence[FileEntry], cache: Path, unhashed: str | None = None) -> Path:
        """A local folder that holds the files of one manifest under their names, each checked by size and SHA-256.

        unhashed: names with this ending are checked by size only, since whoever reads them hashes what is in them.
        A local store gives the folder in place, others a copy below `cache`. Raises ManifestError, naming the file,
        for one that is missing or altered, and ValueError for no entries.
        """
        if not entries:
            raise ValueError("local_copy: no files; the manifest lists none")
        if isinstance(self._backend, LocalBackend):
            for entry in entries:
                check_local(self._backend.local(self.path_of(entry.uri)), entry, _hashed(entry, unhashed))
            first = entries[0]
            return self._backend.local(self.path_of(first.uri).removesuffix(f"/{first.name}"))
        folder = cache / hashlib.sha256("\n".join(sorted(f"{e.sha256} {e.name}" for e in entries)).encode()).hexdigest()
        if not folder.is_dir():
            self._download(entries, folder)
        for entry in entries:
            check_local(folder / entry.name, entry, _hashed(entry, unhashed))
        os.utime(folder)  # when it was last used: `data.prune` asks
        return folder

    def _download(self, entries: Sequence[FileEntry], folder: Path) -> None:
        """All files into a folder beside, which then takes the name: a killed download leaves no half copy."""
        beside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part")
        for entry in entries:
            path, target = self.path_of(entry.uri), beside / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._reading(path):
                    self._backend.fetch(path, entry.version_id, target)
            except FileNotFoundError:
                raise missing(entry) from None
            check_local(target, entry)
        try:
            beside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(beside)  # another process was faster with the same files

    def _holds(self, path: str, written: Written) -> bool:
        """Whether these very bytes are there: then this writer's request came through, but its answer was lost."""
        digest, length = hashlib.sha256(), 0
        if self._backend.size(path) != written.bytes:
            return False
        while length < written.bytes:
            block = self._backend.read(path, None, (length, min(length + READ_BYTES, written.bytes)))
            digest.update(block)
            length += len(block)
        return digest.hexdigest() == written.sha256

    @contextlib.contextmanager
    def _reading(self, path: str) -> Generator[None]:
        with self._asking(path, "read"):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError):
                raise FileNotFoundError(f"{self.url_of(path)}: no such file") from None

    @contextlib.contextmanager
    def _asking(self, path: str, what: str) -> Generator[None]:
        """The place's own errors in one form: address, reason, fix."""
        try:
            yield
        except (StoreError, FileNotFoundError) as error:
            if isinstance(error, StoreError) or what == "read":
                raise
            raise self._refused(path, what, error) from error
        except self._backend.failures as error:
            raise self._refused(path, what, error) from error

    def _refused(self, path: str, what: str, error: Exception) -> StoreError:
        reason, fix = self._backend.explain(error)
        return StoreError(f"store {self.url}: {path} cannot be {what} ({reason}); {fix}")


def _hashed(entry: FileEntry, unhashed: str | None) -> bool:
    return unhashed is None or not entry.name.endswith(unhashed)
