"""The kinds of place a store can be in: tests of the store, the ledger and tables run in each."""

import fsspec
import pytest

from data.store import Store

everywhere = pytest.mark.parametrize("place", ["file", "memory", "s3", "s3 with versions"], indirect=True)
locally_and_on_s3 = pytest.mark.parametrize("place", ["file", "s3"], indirect=True)
on_s3 = pytest.mark.parametrize("place", ["s3"], indirect=True)
on_s3_with_versions = pytest.mark.parametrize("place", ["s3 with versions"], indirect=True)


def vandalise(store: Store, uri: str, data: bytes | None) -> None:
    """Behind the store's back: other bytes at an address, or none."""
    filesystem, root = fsspec.core.url_to_fs(store.url, **({"endpoint_url": store.endpoint} if store.endpoint else {}))
    path = f"{root}/{store.path_of(uri)}"
    filesystem.rm_file(path) if data is None else filesystem.pipe_file(path, data)
    filesystem.invalidate_cache()


def files_of(store: Store) -> list[str]:
    """Every file of a store, by its path there."""
    filesystem, root = fsspec.core.url_to_fs(store.url, **({"endpoint_url": store.endpoint} if store.endpoint else {}))
    filesystem.invalidate_cache()
    return sorted(path.removeprefix(f"{root.rstrip('/')}/") for path in filesystem.find(root))
