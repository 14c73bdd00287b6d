"""Folders on their way into the store: one at a time, gone afterwards, failures told."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from infra.spool import Spool


def test_copies_behind_and_one_at_a_time(tmp_path: Path) -> None:
    spool, go_on, copied = Spool(tmp_path / "spool"), threading.Event(), []

    def copy(folder: Path) -> None:
        go_on.wait(30)
        copied.append((folder / "file").read_text())

    first = spool.folder()
    (first / "file").write_text("one")
    spool.send(first, copy)  # returns although it cannot have been copied
    assert copied == [] and first.is_dir()
    threading.Timer(0.1, go_on.set).start()
    second = spool.folder()  # waits for the first
    assert copied == ["one"] and not first.exists()
    (second / "file").write_text("two")
    spool.send(second, copy)
    spool.drain()
    assert copied == ["one", "two"] and list((tmp_path / "spool").iterdir()) == []


def test_a_failed_copy_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path)

    def copy(folder: Path) -> None:
        raise OSError("no room")

    spool.send(spool.folder(), copy)
    with pytest.raises(OSError, match="no room"):
        spool.folder()
    assert list(tmp_path.iterdir()) == []
    spool.drain()


def test_folders_of_killed_processes_go(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for owner in (ended.pid, os.getppid()):
        (tmp_path / f"{owner}-abc").mkdir()
    mine = Spool(tmp_path).folder()
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted([f"{os.getppid()}-abc", mine.name])
