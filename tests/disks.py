"""Real small disks for tests, made by mounting: a full one and one that takes no writes are not to be had otherwise."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    """A file system of its own at a folder."""

    folder: Path

    def remount(self, options: str) -> None:
        _command("mount", "-o", f"remount,{options}", str(self.folder))


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Disk]:
    """A tmpfs of `size` (as mount takes it) for the length of a block. Skips the test where mounting is not allowed."""
    folder.mkdir(parents=True)
    try:
        _command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', error)}")
    try:
        yield Disk(folder)
    finally:
        _command("umount", "--lazy", str(folder))


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)
