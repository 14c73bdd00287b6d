"""A file of a store that is read in parts, each one request."""

import io

from data.manifest import FileEntry
from data.store import Store


class RangedFile(io.RawIOBase):
    """A stored file whose length its manifest knows. Nothing is fetched before it is read, and nothing is kept."""

    def __init__(self, store: Store, path: str, entry: FileEntry) -> None:
        self._store, self._path, self._entry, self._at = store, path, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.bytes}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Raises FileNotFoundError, or StoreError if the file ends before its manifest says."""
        stop = self._entry.bytes if size < 0 else min(self._at + size, self._entry.bytes)
        if stop <= self._at:
            return b""
        data = self._store.read_span(self._path, self._at, stop, self._entry.version_id)
        self._at += len(data)
        return data
