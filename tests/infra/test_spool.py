"""Work behind: one at a time, its folder gone afterwards, failures told."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from infra.spool import Spool


def test_works_behind_and_one_at_a_time(tmp_path: Path) -> None:
    spool, go_on, done = Spool(tmp_path / "spool"), threading.Event(), []

    def first(folder: Path) -> None:
        go_on.wait(30)
        assert list(folder.iterdir()) == [] and len(list((tmp_path / "spool").iterdir())) == 1
        done.append("one")

    spool.send(first)  # returns although it cannot have been done
    assert done == []
    threading.Timer(0.1, go_on.set).start()
    spool.send(lambda folder: done.append("two"))  # waits for the first
    assert done[0] == "one"
    spool.drain()
    assert done == ["one", "two"] and list((tmp_path / "spool").iterdir()) == []


def test_a_failure_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("no room")

    spool.send(fail)
    with pytest.raises(OSError, match="no room"):
        spool.send(fail)
    assert list(tmp_path.iterdir()) == []
    spool.drain()


def test_folders_of_killed_processes_go(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for owner in (ended.pid, os.getppid()):
        (tmp_path / f"{owner}-abc").mkdir()
    spool = Spool(tmp_path)
    spool.send(lambda folder: None)
    spool.drain()
    assert [f.name for f in tmp_path.iterdir()] == [f"{os.getppid()}-abc"]
