"""The process that drives a run on this machine: one at a time per run, findable, with a log of its own."""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout
from rich.console import Console

log = logging.getLogger("rollbook")
_stop_asked = threading.Event()
_farewells_spared = threading.Event()
LOG_FILE = "run.log"
NAME_S = 2.0
POLL_S = 1.0  # seconds between two looks at a run that another process drives


class RunBusy(RuntimeError):
    """Another process drives the run."""


@dataclass(frozen=True)
class Holder:
    """Who drives a run."""

    pid: int
    host: str
    started: float  # seconds since the epoch, of the process: a pid may be used again

    @classmethod
    def me(cls) -> "Holder":
        process = psutil.Process()
        return cls(process.pid, socket.gethostname(), process.create_time())

    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            ended = process.status() == psutil.STATUS_ZOMBIE  # its parent has not asked yet
            return not ended and abs(process.create_time() - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False


def holder_of(folder: Path) -> Holder | None:
    """The living process that drives the run of this folder, if there is one."""
    try:
        holder = Holder(**json.loads((folder / "driver.json").read_text()))
    except FileNotFoundError:
        return None
    return holder if holder.alive() else None


def holders(runs: Path) -> dict[str, Holder]:
    """The living processes that drive runs of this home, by run."""
    folders = runs.iterdir() if runs.is_dir() else iter(())
    found = {folder.name: holder_of(folder) for folder in folders}
    return {run: holder for run, holder in found.items() if holder is not None}


def busy(run: str, holder: Holder | None) -> RunBusy:
    who = f"process {holder.pid} on {holder.host}" if holder else "another process"
    return RunBusy(f"run {run!r} is driven by {who}; wait for it, or `rollbook stop {run}`")


@contextlib.contextmanager
def driving(folder: Path, run: str, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the run, log to its file and the terminal, and turn SIGTERM into a clean stop.

    Raises RunBusy, naming the holder, if another process drives it, and goes on doing so for `patience_s`. The lock
    dies with its process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "driver.lock")
    try:
        lock.acquire(timeout=patience_s, poll_interval=POLL_S)
    except Timeout:
        raise busy(run, _named_holder(folder)) from None
    _enter_name(folder)
    try:
        with _logging_to(folder / LOG_FILE), interruptible():
            yield
    finally:
        (folder / "driver.json").unlink(missing_ok=True)
        lock.release()


def _enter_name(folder: Path) -> None:
    beside = folder / f"driver.json.{os.getpid()}"
    beside.write_text(json.dumps(asdict(Holder.me())))
    beside.replace(folder / "driver.json")  # nobody reads half a name


def _named_holder(folder: Path) -> Holder | None:
    """Who has the lock: it was taken a moment before its holder's name is there."""
    deadline = time.monotonic() + NAME_S
    while (holder := holder_of(folder)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return holder


def stop(holder: Holder, grace_s: float) -> bool:
    """Ask a driver to stop and wait; True if it is gone within `grace_s`."""
    os.kill(holder.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while holder.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not holder.alive()


@contextlib.contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    handler.handle(logging.makeLogRecord({"levelname": "INFO", "msg": f"driven by process {os.getpid()}"}))
    try:
        yield
    except BaseException as error:
        # To the file alone: whoever catches it tells the terminal.
        story = "".join(traceback.format_exception(error))
        handler.handle(
            logging.makeLogRecord({"levelname": "ERROR", "msg": f"ended by {type(error).__name__}\n{story}"})
        )
        raise
    finally:
        log.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does, so that what it holds is let go."""

    def interrupt(signum: int, frame: object) -> None:
        _stop_asked.set()
        raise KeyboardInterrupt(f"signal {signum}")

    try:
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread, as under a Prefect worker, which cancels by its own means
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _stop_asked.clear()


def require_going_on() -> None:
    """Raises KeyboardInterrupt if a stop was asked for: a library may have swallowed the first one."""
    if _stop_asked.is_set():
        raise KeyboardInterrupt


def spare_farewells() -> None:
    """Let `leave` end this process at once: Prefect would offer a dead server each event it has left, 7 s an event."""
    _farewells_spared.set()


def leave(code: object) -> None:
    """End the process with an exit code if farewells are spared; all that is ours must be closed."""
    if _farewells_spared.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


def log_to_terminal(console: Console) -> None:
    """Rollbook's own lines, and nobody else's, on the terminal."""
    log.addHandler(_ConsoleHandler(console))
    log.propagate = False
    logging.raiseExceptions = False  # a library whose log cannot be sent would print so


class _ConsoleHandler(logging.Handler):
    """Prints through the console that a progress bar draws on; long lines are left to the terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), soft_wrap=True, markup=False, highlight=False)
