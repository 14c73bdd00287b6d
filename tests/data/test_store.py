"""The store: files are written once, a race has one winner, and what cannot be written says so in one line."""

import os
import pickle
import threading
from pathlib import Path

import pytest

from data.manifest import FileEntry, ManifestError
from data.store import Store, StoreError
from tests.data.places import everywhere, files_of, locally_and_on_s3, vandalise


def put(store: Store, path: str, data: bytes) -> FileEntry:
    with store.open_new(path) as file:
        file.write(data)
    return FileEntry(
        name=path.split("/", 1)[1], uri=store.url_of(path), sha256=file.written.sha256, bytes=file.written.bytes
    )


@everywhere
def test_what_was_created_stays(store: Store):
    assert store.create("a/b/m.json", b"first")
    assert not store.create("a/b/m.json", b"other")
    assert store.read_bytes("a/b/m.json") == b"first"
    assert store.exists("a/b/m.json")
    assert not store.exists("a/c")


@everywhere
def test_a_new_file_is_hashed_on_its_way_and_never_replaced(store: Store):
    # SHA-256 of "abc" from FIPS 180-2, appendix B.1.
    entry = put(store, "a/f", b"abc")
    assert entry.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert entry.bytes == 3
    with pytest.raises(StoreError, match="a/f cannot be written"):
        put(store, "a/f", b"other")
    assert store.read_bytes("a/f") == b"abc"
    assert store.open_buffer("a/f").to_pybytes() == b"abc"


@everywhere
def test_a_missing_file_is_named(store: Store):
    for read in (store.read_bytes, store.open_buffer):
        with pytest.raises(FileNotFoundError, match=f"{store.url}/a/b: no such file"):
            read("a/b")


@everywhere
def test_folders_are_listed_without_files(store: Store):
    for path in ("x/b/1", "x/a/2", "x/file"):
        store.create(path, b"")
    assert store.list_dirs("x") == ["a", "b"]
    assert store.list_dirs() == ["x"]
    assert store.list_dirs("nowhere") == []


@everywhere
def test_an_empty_file_can_be_read(store: Store):
    put(store, "a/f", b"")
    assert store.open_buffer("a/f").size == 0


@everywhere
def test_addresses(store: Store):
    assert store.path_of(store.url_of("a/b")) == "a/b"
    with pytest.raises(StoreError, match="s3://elsewhere/x: not in the store"):
        store.path_of("s3://elsewhere/x")


def test_a_plain_path_is_a_file_url(tmp_path: Path):
    assert Store(str(tmp_path / "s")).url == f"file://{tmp_path}/s"
    assert Store(f"file://{tmp_path}/s/") == Store(str(tmp_path / "s"))


@everywhere
def test_it_crosses_processes_without_its_connections(store: Store):
    store.create("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert again.read_bytes("a") == b"1"


def test_an_unknown_protocol_is_named():
    with pytest.raises(StoreError, match=r"store 'gopher://x': .*use file://, s3://"):
        Store("gopher://x")


def test_a_file_in_the_way_of_the_store(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    store = Store(str(tmp_path / "file" / "store"))
    with pytest.raises(StoreError, match=r"file/store: .* cannot be written .*no file is where a folder must"):
        store.check_writable()
    with pytest.raises(StoreError):
        put(store, "a/f", b"x")
    assert store.list_dirs() == []


def test_a_place_where_no_one_may_write():
    with pytest.raises(StoreError, match=r"store file:///proc/rollbook: .* cannot be written"):
        Store("/proc/rollbook").check_writable()


@everywhere
def test_check_writable_leaves_nothing(store: Store):
    store.create("a", b"1")
    store.check_writable()
    assert files_of(store) == ["a"]


@locally_and_on_s3
def test_one_of_many_threads_wins(store: Store):
    barrier, won = threading.Barrier(8), []

    def race(mark: int) -> None:
        barrier.wait()
        if store.create("deep/er/m", bytes([mark]) * 1000):
            won.append(mark)

    threads = [threading.Thread(target=race, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read_bytes("deep/er/m") == bytes(won) * 1000
    assert files_of(store) == ["deep/er/m"]  # no temporary file stays


def test_a_local_store_gives_its_own_folder(store: Store, tmp_path: Path):
    entries = [put(store, "attempt/model.bin", b"weights"), put(store, "attempt/sub/config.json", b"{}")]
    folder = store.local_copy(entries, tmp_path / "cache")
    assert folder == tmp_path / "store" / "attempt"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("place", ["memory", "s3"], indirect=True)
def test_another_store_is_copied_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entries = [put(store, "attempt/model.bin", b"weights"), put(store, "attempt/sub/config.json", b"{}")]
    folder = store.local_copy(entries, tmp_path / "cache")
    assert (folder / "model.bin").read_bytes() == b"weights"
    assert (folder / "sub" / "config.json").read_bytes() == b"{}"
    monkeypatch.setattr(Store, "_download", None)
    assert store.local_copy(entries, tmp_path / "cache") == folder
    assert os.listdir(tmp_path / "cache") == [folder.name]
    (folder / "model.bin").write_bytes(b"WEIGHTS")
    with pytest.raises(ManifestError, match=r"model.bin: altered: sha256 \w+, the manifest says \w+"):
        store.local_copy(entries, tmp_path / "cache")


def test_what_its_reader_hashes_is_checked_by_size_only(store: Store, tmp_path: Path):
    entries = [put(store, "attempt/model.bin", b"weights"), put(store, "attempt/config.json", b"{}")]
    folder = store.local_copy(entries, tmp_path / "cache")
    (folder / "model.bin").write_bytes(b"WEIGHTS")
    assert store.local_copy(entries, tmp_path / "cache", unhashed=".bin") == folder
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(ManifestError, match=r"config.json: altered: sha256"):
        store.local_copy(entries, tmp_path / "cache", unhashed=".bin")
    (folder / "model.bin").write_bytes(b"WEIGHT")
    with pytest.raises(ManifestError, match=r"model.bin: altered: 6 bytes, the manifest says 7"):
        store.local_copy(entries, tmp_path / "cache", unhashed=".bin")


@pytest.mark.parametrize("place", ["memory", "s3"], indirect=True)
def test_a_missing_file_of_another_store_is_named(store: Store, tmp_path: Path):
    entry = put(store, "attempt/model.bin", b"weights")
    vandalise(store, entry.uri, None)
    with pytest.raises(ManifestError, match=r"attempt/model.bin: missing, but a manifest lists it"):
        store.local_copy([entry], tmp_path / "cache")


def test_a_missing_or_altered_local_file_is_named(store: Store, tmp_path: Path):
    entry = put(store, "attempt/model.bin", b"weights")
    target = tmp_path / "store" / "attempt" / "model.bin"
    target.write_bytes(b"weight")
    with pytest.raises(ManifestError, match=r"attempt/model.bin: altered: 6 bytes, the manifest says 7"):
        store.local_copy([entry], tmp_path)
    target.write_bytes(b"weighty")
    with pytest.raises(ManifestError, match=f"altered: sha256 .*, the manifest says {entry.sha256}"):
        store.local_copy([entry], tmp_path)
    target.unlink()
    with pytest.raises(ManifestError, match=r"attempt/model.bin: missing"):
        store.local_copy([entry], tmp_path)
    with pytest.raises(ValueError, match="no files"):
        store.local_copy([], tmp_path)
