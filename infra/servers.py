"""`rollbook up`: the MLflow and Prefect servers of one home, on loopback; and a Prefect server for one command.

SQLite unless the environment names another database: MLFLOW_TRACKING_URI, PREFECT_SERVER_DATABASE_CONNECTION_URL.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.home import SERVERS, Home

HOST = "127.0.0.1"
START_S = 300.0
TELLING = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR"}  # a server that fails says why, in its log
OWN_PORTS = range(8000, 9000)  # none that the system gives to whoever asks for any


class ServerError(RuntimeError):
    """A server that cannot be started; the message says which, why and what to do."""


@dataclass(frozen=True)
class Servers:
    """Two running servers."""

    mlflow_url: str
    prefect_url: str
    pids: tuple[int, int]


def record_path(home: Home) -> Path:
    return home.root / SERVERS


@contextlib.contextmanager
def serving(home: Home, mlflow_port: int, prefect_port: int) -> Iterator[tuple[Servers, Callable[[], str | None]]]:
    """Both servers, up and answering; the function given with them names one that has ended, else None.

    Raises ServerError for a taken port or a server that does not come up (its log is named).
    """
    for name, port in (("MLflow", mlflow_port), ("Prefect", prefect_port)):
        _require_free(name, port)
    mlflow_url, prefect_url = f"http://{HOST}:{mlflow_port}", f"http://{HOST}:{prefect_port}"
    with contextlib.ExitStack() as stack:
        backend = {"MLFLOW_BACKEND_STORE_URI": home.tracking_uri}  # not an argument, which all users of a machine see
        mlflow = stack.enter_context(_process("mlflow", _mlflow_command(home, mlflow_port), home, backend))
        pages = {"PREFECT_SERVER_UI_API_URL": f"{prefect_url}/api"}  # by default they ask port 4200, whatever the port
        prefect = stack.enter_context(_process("prefect", _prefect_command(prefect_port), home, pages | TELLING))
        _await("MLflow", f"{mlflow_url}/health", mlflow, home.root / "mlflow.log")
        _await("Prefect", f"{prefect_url}/api/health", prefect, home.root / "prefect.log")
        servers = Servers(mlflow_url, prefect_url, (mlflow.pid, prefect.pid))
        record_path(home).write_text(json.dumps(asdict(servers)))
        stack.callback(record_path(home).unlink, missing_ok=True)

        def ended() -> str | None:
            return next((name for name, p in (("MLflow", mlflow), ("Prefect", prefect)) if p.poll() is not None), None)

        yield servers, ended


@dataclass(frozen=True)
class OwnPrefect:
    """A Prefect server that lives as long as one command."""

    url: str  # of its API
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def await_ready(self) -> None:
        """Raises ServerError if it does not come up."""
        _await("Prefect", f"{self.url}/health", self.process, self.log)


@contextlib.contextmanager
def own_prefect(home: Home) -> Iterator[OwnPrefect]:
    """It has been started, and need not answer yet. Without pages: nobody could look at them for long.

    Prefect's client would start such a server too; but only once the flow begins, after it has loaded the whole server
    into the caller (3 s of CPU), and in the caller's process group, where Ctrl-C ends it before the flow.
    """
    port = next(filter(_is_free, random.sample(OWN_PORTS, len(OWN_PORTS))), None)
    if port is None:
        raise ServerError(f"no port from {OWN_PORTS[0]} to {OWN_PORTS[-1]} is free for Prefect; set PREFECT_API_URL")
    app = ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on", "--log-level", "error"]
    command = [sys.executable, "-m", "uvicorn", *app, "--host", HOST, "--port", str(port)]
    how = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    with _process("prefect", command, home, how | TELLING) as process:
        yield OwnPrefect(f"http://{HOST}:{port}/api", process, home.root / "prefect.log")


def _mlflow_command(home: Home, port: int) -> list[str]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    return [*command, "--default-artifact-root", str(home.mlflow_artifacts)]


def _prefect_command(port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]


@contextlib.contextmanager
def _process(name: str, command: list[str], home: Home, own: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | own
    with (home.root / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _require_free(name: str, port: int) -> None:
    if not _is_free(port):
        raise ServerError(
            f"port {port} for {name} is taken; stop what uses it, or choose another with --{name.lower()}-port"
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _await(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace").splitlines()[-1:]
            raise ServerError(f"{name} did not come up: {''.join(tail)[:300]}; the whole story is in {log}")
        time.sleep(0.3)


def answers(url: str) -> bool:
    """Whether a health page answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
