"""`rollbook up` and a worker on a desk, for real, and Prefect's API asked over HTTP."""

import contextlib
import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from tests.seaweed import free_ports

ENDED = ("Completed", "Failed", "Crashed", "Cancelled", "Suspended")


@dataclass(frozen=True)
class Prefect:
    """A server with a worker."""

    api: str

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """What the API answers; of a refusal its status and text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api}{path}", data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = answer.read()
                return json.loads(said) if said else None
        except urllib.error.HTTPError as error:
            return {"refused": error.code, "said": error.read().decode()}

    def deployment(self, name: str) -> Any:
        return self.ask("GET", f"/deployments/name/{name}")

    def asked_for(self, name: str, **parameters: Any) -> Any:
        """Ask for a flow run now; what the server says."""
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        return self.ask("POST", path, {"parameters": parameters, "state": {"type": "SCHEDULED"}})

    def start(self, name: str, **parameters: Any) -> str:
        """Likewise; the flow run's id."""
        made = self.asked_for(name, **parameters)
        assert "id" in made, made
        return made["id"]

    def state(self, flow_run: str) -> tuple[str, str]:
        found = self.ask("GET", f"/flow_runs/{flow_run}")["state"]
        return found["name"], found["message"] or ""

    def wait(self, flow_run: str, *states: str, within_s: float = 150) -> tuple[str, str]:
        """Name and message of the first of these states, by default of the ends. Fails if none comes."""
        await_true(lambda: self.state(flow_run)[0] in (states or ENDED), within_s, lambda: self.state(flow_run))
        return self.state(flow_run)

    def flow_runs(self, name: str) -> list[Any]:
        """All of a deployment, the earliest first."""
        chosen = {"deployments": {"id": {"any_": [self.deployment(name)["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return self.ask("POST", "/flow_runs/filter", chosen)

    def task_runs(self, flow_run: str, name: str) -> list[str]:
        """States of the task runs of that name, in which they were left."""
        found = self.ask("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        return [run["state_name"] for run in found if run["name"].rsplit("-", 1)[0] == name]


def await_true(call: Any, within_s: float, told: Any = lambda: "") -> None:
    """Fails, with what `told` tells, if the call does not come true."""
    deadline = time.monotonic() + within_s
    while not call():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


@contextlib.contextmanager
def serving(desk: Any) -> Iterator[Prefect]:
    """Servers and a worker of a desk; nothing of them is left afterwards."""
    mlflow, prefect = free_ports(2)
    up = desk.command("up", "--mlflow-port", str(mlflow), "--prefect-port", str(prefect))
    with _running(desk, up, "up.log"):
        await_true((desk.folder / ".rollbook/servers.json").exists, 180)
        with _running(desk, desk.command("worker"), "worker.log"):
            yield Prefect(f"http://127.0.0.1:{prefect}/api")


@contextlib.contextmanager
def _running(desk: Any, command: list[str], log: str) -> Iterator[None]:
    with (desk.folder / log).open("wb") as out:
        process = subprocess.Popen(
            command, cwd=desk.folder, env=desk.environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs([psutil.Process(process.pid), *family], timeout=60)
            for one in left:
                one.kill()
            process.wait()
