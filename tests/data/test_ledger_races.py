"""Several attempts at one step, and kills in the middle of one: one manifest, whole, or none."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data.files import HashingFile
from data.ledger import Address, Ledger, Request
from data.manifest import Manifest
from data.store import Store
from tests.data.places import everywhere, locally_and_on_s3

Build = Callable[..., Request]


@everywhere
def test_two_attempts_at_once_give_one_manifest(ledger: Ledger, request_of: Build, rollouts: pa.Table):
    """C28, in threads: all get the winner's."""
    barrier, got = threading.Barrier(6), []

    def run() -> None:
        attempt = ledger.writer(ledger.at(0, "generate"), request_of())
        attempt.add_table("rollouts", rollouts)
        barrier.wait()
        got.append(attempt.commit())

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert all(manifest == ledger.find(ledger.at(0, "generate")) for manifest in got)


# Children write plain files only: Arrow's threads do not live on in a fork.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def record_files(ledger: Ledger, request: Request, source: Path) -> Manifest:
    attempt = ledger.writer(ledger.at(0, "publish"), request)
    attempt.add_folder(source)
    return attempt.commit()


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A folder of two files."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "policy"


@forks
@locally_and_on_s3
def test_two_processes_at_once_give_one_manifest(ledger: Ledger, request_of: Build, policy: Path, tmp_path: Path):
    """C28, in processes that start their commit together and write down what they got."""
    address, (ready, go) = Address("sort/000000/publish", "sort", 0), os.pipe()  # no connection before the fork
    children = []
    for number in range(4):
        if child := os.fork():
            children.append(child)
            continue
        try:
            os.close(go)
            attempt = ledger.writer(address, request_of())
            attempt.add_folder(policy)
            os.read(ready, 1)  # until the parent closes its end
            (tmp_path / f"got-{number}").write_text(attempt.commit().model_dump_json())
        finally:
            os._exit(0)
    os.close(go)
    for child in children:
        os.waitpid(child, 0)
    os.close(ready)
    winner = ledger.find(address)
    assert winner is not None
    assert [Manifest.model_validate_json((tmp_path / f"got-{n}").read_text()) for n in range(4)] == [winner] * 4


def die_at(event: int, root: Path) -> None:
    """Kill this process just before its n-th act on a file below `root`: open, make, link, remove or write."""
    left = [event]

    def act() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(name: str, args: tuple[Any, ...]) -> None:
        if name in ("open", "os.mkdir", "os.link", "os.remove", "os.rename") and str(args[0]).startswith(str(root)):
            act()

    write = HashingFile.write

    def counted(self: HashingFile, data: Any) -> int:
        act()
        return write(self, data)

    HashingFile.write = counted
    sys.addaudithook(audit)


def killed_at(event: int, root: Path, work: Callable[[], Any]) -> bool:
    """Do the work in a child that dies at the n-th act; False if it came to its end before."""
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        return code != 0
    code = 1
    try:
        die_at(event, root)
        work()
        code = 0
    finally:
        os._exit(code)


@forks
def test_a_kill_between_any_two_writes_leaves_all_or_nothing(tmp_path: Path, request_of: Build, policy: Path):
    request, without, complete = request_of(), 0, 0
    for event in range(100):
        root = tmp_path / f"store-{event}"
        ledger = Ledger(Store(str(root)), "sort")
        killed = killed_at(event, root, functools.partial(record_files, ledger, request, policy))
        found = ledger.resolve(ledger.at(0, "publish"), request)
        without, complete = without + (found is None), complete + (found is not None)
        again = record_files(ledger, request, policy)  # the same command after the kill
        assert found in (None, again)
        for manifest in filter(None, (found, again)):
            copy = ledger.store.local_copy(manifest.files, tmp_path / "cache")
            assert (copy / "model.safetensors").read_bytes() == b"weights"
        if not killed:
            break
    # Folders, attempt, two files opened, written and synced, the temporary manifest: ten acts and more before the link.
    assert without >= 10
    assert complete >= 2  # killed after the link, and the one that lived
    assert not killed
