"""A folder on a disk that is full, or takes no writes any more: one line, nothing half there, and on it goes after."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from data.ledger import Ledger, Request, read_table
from data.store import Store, StoreError
from tests.data.places import files_of
from tests.disks import Disk, small_disk

MORE = "make room on that disk; the same command then goes on"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", "256k") as made:
        yield made


@pytest.fixture
def enter(
    disk: Disk, many_rollouts: Callable[[int], pa.Table], request_of: Callable[..., Request]
) -> Callable[[int], None]:
    """Enter so many rollouts in the ledger of that disk."""

    def act(roots: int) -> None:
        ledger, table = Ledger(Store(str(disk.folder)), "sort"), many_rollouts(roots)
        attempt = ledger.writer(ledger.at(0, "generate"), request_of())
        attempt.add_table("rollouts", table)
        assert read_table(ledger.store, attempt.commit()).equals(table)

    return act


def refused(disk: Disk, act: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as raised:
        act()
    said = str(raised.value)
    assert "\n" not in said and said.startswith(f"store file://{disk.folder}: ") and "cannot be written (" in said
    return said


def test_a_full_disk(disk: Disk, enter: Callable[[int], None]) -> None:
    """The half file goes: it would take what little room there is."""
    filler = disk.folder / "filler"
    filler.write_bytes(b"x" * (252 * 1024))
    said = refused(disk, lambda: enter(3000))
    assert "rollouts-000.parquet cannot be written (No space left on device); " + MORE in said
    assert files_of(Store(str(disk.folder))) == ["filler"]
    assert MORE in refused(disk, lambda: Store(str(disk.folder)).create("m", b"x" * 5000))
    assert files_of(Store(str(disk.folder))) == ["filler"]
    filler.unlink()
    enter(3000)


def test_a_disk_that_takes_no_writes(disk: Disk, enter: Callable[[int], None]) -> None:
    disk.remount("ro")
    assert "(Read-only file system); give back the right to write there" in refused(disk, lambda: enter(1))
    refused(disk, Store(str(disk.folder)).check_writable)
    disk.remount("rw")
    assert files_of(Store(str(disk.folder))) == []
    enter(1)


def test_a_folder_whose_permission_was_taken(tmp_path: Path) -> None:
    """Root passes over mode bits, but not over this attribute."""
    store = Store(str(tmp_path / "store"))
    store.create("a/m", b"1")
    folder = tmp_path / "store" / "a"
    try:
        subprocess.run(["chattr", "+i", str(folder)], check=True, capture_output=True, timeout=30)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"chattr does not work here: {getattr(error, 'stderr', error)}")
    try:
        with pytest.raises(StoreError, match=r"a/n cannot be written \(Operation not permitted\); give back the right"):
            store.create("a/n", b"2")
        assert store.read_bytes("a/m") == b"1"
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True, timeout=30)
    assert store.create("a/n", b"2")
    assert files_of(store) == ["a/m", "a/n"]
