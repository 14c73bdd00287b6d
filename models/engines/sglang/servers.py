"""SGLang servers of our own: child processes on free ports of this machine, which end when this process does."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from data.config import EngineConfig
from models.engines.sglang.backend import BackendLost, BackendRefused
from models.engines.sglang.complaints import explain
from models.engines.sglang.http import Served

HOST = "127.0.0.1"
LOOK_S = 0.5
HEALTH_S = 30.0
BAD_USAGE = 2  # argparse's exit status
# Linux kills the server when the thread that started it ends, even by SIGKILL; what became of exec keeps that.
LEASH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Own(Served):
    """A server that was started for us. The thread that makes it must live as long as it shall."""

    def __init__(
        self, arguments: dict[str, Any], config: EngineConfig, gpu: str | None, closing: threading.Event
    ) -> None:
        """Returns when it can generate; `closing` ends the wait.

        Raises BackendLost, with what SGLang said, if it cannot be started, ValueError for arguments it does not know.
        """
        port, rendezvous = _free_ports(2)
        super().__init__(f"http://{HOST}:{port}", config.batch, config.timeout_s)
        self._log = Path(tempfile.mkstemp(prefix=f"rollbook-sglang-{port}-", suffix=".log")[1])
        ports = {"host": HOST, "port": port, "nccl_port": rendezvous}
        self._process = _start(flags(arguments | ports), gpu, self._log)
        try:
            self._await(closing)
        except BaseException:
            self.close()
            raise
        os.truncate(self._log, 0)  # a server that came up complains of trifles, which would explain its end wrongly

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        super().close()
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(family, timeout=10.0)
        self._log.unlink(missing_ok=True)

    def _await(self, closing: threading.Event) -> None:
        end = time.monotonic() + self._timeout_s
        while not self._healthy():
            if self._process.poll() is not None:
                raise self._failed()
            if closing.wait(LOOK_S):
                raise BackendLost("SGLang was stopped while it started")
            if time.monotonic() > end:
                raise BackendLost(
                    f"SGLang did not start within engine.timeout_s = {self._timeout_s:g} s: "
                    f"{explain(self._log, 'no error in its log')}"
                )

    def _healthy(self) -> bool:
        try:
            self._call("GET", "/health", timeout_s=HEALTH_S)
        except (BackendLost, BackendRefused):
            return False
        return True

    def _failed(self) -> Exception:
        status = self._process.returncode
        said = explain(self._log, f"its process ended with status {status}")
        if status == BAD_USAGE:
            return ValueError(
                f"engine.arguments: SGLang does not take them ({said}); `python -m sglang.launch_server --help` lists "
                "what it takes (with underscores here)"
            )
        return BackendLost(f"SGLang does not start: {said}")

    def _lost(self, path: str, reason: str) -> str:
        return f"{super()._lost(path, reason)}; {explain(self._log, 'no error in its log')}"


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments of `sglang.Engine` as flags of its server; what is False or None is left out."""
    given = {f"--{name.replace('_', '-')}": value for name, value in arguments.items()}
    return [
        flag if value is True else f"{flag}={value}"
        for flag, value in given.items()
        if value is not None and value is not False
    ]


def _start(arguments: list[str], gpu: str | None, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    command = [sys.executable, "-P", "-m", "sglang.launch_server", *arguments]
    with log.open("ab") as file:
        # A session of its own: Ctrl-C must not reach it, and all it starts can be ended together.
        return subprocess.Popen(
            [sys.executable, "-c", LEASH, str(os.getpid()), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
