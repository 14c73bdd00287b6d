"""Python for the model: an interpreter of its own for each trajectory, whose variables stay from call to call."""

import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from models.tools.excerpt import excerpt

CHILD = Path(__file__).with_name("sandbox_child.py")
REFUSED = 3  # its exit status where the kernel does not let it be isolated
SHOWN = 4_000  # characters that the model sees of what a call printed
PRINTED = 4 << 20  # bytes after which a call is ended
CODE = 100_000  # bytes that a call may have
START_S = 60.0
END_S = 5.0
FOLDER = "/tmp/work"  # the working folder of isolated code, on a file system of its own
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

Seconds = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(gt=0)]  # to tmpfs no size is no limit

_TRYING = threading.Lock()


class SandboxRefused(RuntimeError):
    """The model's code cannot be isolated on this machine; the message has the fix."""


class SessionLost(Exception):
    """The interpreter is gone."""

    def __init__(self, reason: str, printed: str) -> None:
        super().__init__(reason)
        self.printed = printed


@dataclass(frozen=True)
class Limits:
    """What the model's code may use."""

    memory_mb: int  # address space of each process
    cpu_s: int  # of each process, over all calls
    processes: int  # at a time, with threads
    disk_mb: int  # of the working folder (not isolated: of each file)


class Python:
    """Runs the model's code in a process that is started at the first call.

    Isolated, it has no network, sees neither other processes nor the folders of users (/home, /root, /tmp, /run and
    devices), can write nothing but its working folder, and everything it starts ends with a call. It is not root, and
    has none of this process's environment. With `isolated=False`, for machines without user namespaces, there are only
    the limits of memory, CPU time and file size: the code then has the network and all that this user has.
    Neither is a boundary against somebody who attacks the kernel: it keeps a policy in training from doing harm.
    """

    name = "python"

    def __init__(
        self,
        timeout_s: Seconds = 10.0,
        memory_mb: Count = 1024,
        cpu_s: Count = 60,
        processes: Count = 16,
        disk_mb: Count = 64,
        isolated: bool = True,
    ) -> None:
        """Raises SandboxRefused if it cannot be isolated here."""
        if isolated:
            with _TRYING:
                _require_isolation()
        self._limits = Limits(memory_mb, cpu_s, processes, disk_mb)
        self._timeout_s, self._isolated = timeout_s, isolated
        self._session: Session | None = None
        self._restarted = self._closed = False
        self._changing = threading.Lock()

    def __call__(self, code: str) -> str:
        """Run Python code; variables stay for the next call.

        Answers with what it prints and the value of a last expression.
        """
        if len(code.encode()) > CODE:
            raise ValueError(f"the code has {len(code.encode())} bytes; at most {CODE} are allowed")
        session = self._running()
        note = "[a new interpreter: earlier variables are gone]\n" if self._restarted else ""
        self._restarted = False
        try:
            return note + excerpt(session.run(code, self._timeout_s), SHOWN)
        except SessionLost as lost:
            self._end()
            return f"{note}{excerpt(lost.printed, SHOWN)}\n[{lost}; the interpreter was ended]".lstrip("\n")

    def close(self) -> None:
        """Ends the process and all that it started."""
        self._closed = True
        self._end()

    def _running(self) -> "Session":
        if self._session is not None and not self._session.alive:
            self._end()
        with self._changing:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            self._session = self._session or Session(self._limits, self._isolated)
            return self._session

    def _end(self) -> None:
        with self._changing:
            session, self._session = self._session, None
        if session is not None:
            self._restarted = True
            session.end()


class Session:
    """One interpreter."""

    def __init__(self, limits: Limits, isolated: bool) -> None:
        """Returns when it is ready. Raises SandboxRefused, or SessionLost if it ends while it starts."""
        folder = FOLDER if isolated else tempfile.mkdtemp(prefix="rollbook-python-")
        self._control, control = socket.socketpair()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._calling = threading.Lock()
        given = asdict(limits) | {"folder": folder, "isolated": isolated, "home": os.path.expanduser("~")}
        given |= {"parent": os.getpid(), "control": control.fileno(), "output": output}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(CHILD), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                pass_fds=(control.fileno(), output),
                start_new_session=True,
                bufsize=0,
            )
        finally:
            control.close()
            os.close(output)
        try:
            self._collect(time.monotonic() + START_S)
        except SessionLost as lost:
            self.end()
            if self._process.returncode == REFUSED:
                raise SandboxRefused(_refusal(lost.printed)) from None
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, code: str, timeout_s: float) -> str:
        """What it printed. Raises SessionLost if it ends, or does not within the time."""
        end = time.monotonic() + timeout_s
        data = code.encode()
        with self._calling:
            try:
                self._control.settimeout(timeout_s)
                self._control.sendall(len(data).to_bytes(4) + data)
            except OSError:
                raise SessionLost(self._reason(), "") from None
            return self._collect(end)

    def end(self) -> None:
        """Ends it and all that it started. A call in progress then raises SessionLost."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(b".")
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._calling:
            self._process.stdin.close()
            self._control.close()
            os.close(self._output)

    def _collect(self, end: float) -> str:
        """What is printed until it says that it is done."""
        printed = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._output, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(max(end - time.monotonic(), 0.0))}
                self._read(printed)
                if self._control in ready and self._control.recv(1):
                    return printed.decode(errors="replace")
                lost = self._reason() if self._control in ready else _excess(len(printed), end)
                if lost:
                    raise SessionLost(lost, printed.decode(errors="replace"))

    def _read(self, printed: bytearray) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(printed) <= PRINTED and (part := os.read(self._output, 1 << 16)):
                printed += part

    def _reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        status = self._process.returncode
        if status is None or status <= 128:
            return f"the process ended with status {status}"
        return f"the process was ended by {signal.Signals(status - 128).name}"


def _excess(printed: int, end: float) -> str | None:
    if printed > PRINTED:
        return f"it printed more than {PRINTED >> 20} MB"
    return "it took too long" if time.monotonic() >= end else None


@functools.cache
def _require_isolation() -> None:
    """Once a process."""
    Session(Limits(1024, 60, 16, 1), True).end()


def _refusal(reason: str) -> str:
    return (
        f"the model's code cannot be isolated on this machine ({reason}). Allow user namespaces (in a "
        "container: --cap-add SYS_ADMIN; on Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0), or set "
        "environment.options.python.isolated = false: the code then has the network and all that this user has"
    )
