"""Local folders that wait to be copied into the store while work goes on: one at a time, in a background thread."""

import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil


class Spool:
    """Of one process. A folder is gone once it is copied; those of processes that were killed go with the next one."""

    def __init__(self, root: Path) -> None:
        self._root, self._thread = root, ThreadPoolExecutor(1, "spool")
        self._copying: Future[None] | None = None

    def folder(self) -> Path:
        """A new empty folder, once the one before is copied: no more than one ever waits. Raises what that raised."""
        self.drain()
        self._sweep()
        made = self._root / f"{os.getpid()}-{uuid.uuid4().hex}"
        made.mkdir(parents=True)
        return made

    def send(self, folder: Path, copy: Callable[[Path], None]) -> None:
        """Run `copy(folder)` behind."""
        self._copying = self._thread.submit(_copy_and_remove, folder, copy)

    def drain(self) -> None:
        """Wait until everything is copied. Raises what copying raised."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def _sweep(self) -> None:
        for left in self._root.glob("*-*"):
            pid = left.name.split("-")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)


def _copy_and_remove(folder: Path, copy: Callable[[Path], None]) -> None:
    try:
        copy(folder)
    finally:
        shutil.rmtree(folder)
