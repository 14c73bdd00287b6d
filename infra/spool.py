"""Work behind: what goes by a local folder into the store while other work goes on, one at a time, in a thread."""

import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil


class Spool:
    """Of one process. A folder is gone once its work is done; those of processes that were killed go with the next."""

    def __init__(self, root: Path) -> None:
        self._root, self._thread = root, ThreadPoolExecutor(1, "spool")
        self._working: Future[None] | None = None

    def send(self, work: Callable[[Path], None]) -> None:
        """Do `work` behind, with a new empty folder, once the work before is done. Raises what that raised."""
        self.drain()
        self._working = self._thread.submit(self._do, work)

    def drain(self) -> None:
        """Wait until everything is done. Raises what it raised."""
        working, self._working = self._working, None
        if working is not None:
            working.result()

    def _do(self, work: Callable[[Path], None]) -> None:
        self._sweep()
        folder = self._root / f"{os.getpid()}-{uuid.uuid4().hex}"
        folder.mkdir(parents=True)
        try:
            work(folder)
        finally:
            shutil.rmtree(folder)

    def _sweep(self) -> None:
        for left in self._root.glob("*-*"):
            pid = left.name.split("-")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
