"""`rollbook up` and `rollbook doctor`, for real."""

import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from threading import Event
from typing import Any

import psutil
from mlflow.tracking import MlflowClient

from data.ledger import Ledger
from infra.servers import answers
from infra.traces import Place, Sent, TraceSender
from tests.conversations import by_trajectory, record


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_up_serves_what_a_run_recorded_and_leaves_nothing_behind(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    mlflow, prefect = free_port(), free_port()
    process = subprocess.Popen(
        desk.command("up", "--mlflow-port", str(mlflow), "--prefect-port", str(prefect)),
        cwd=desk.folder, env=desk.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith(f"MLflow   http://127.0.0.1:{mlflow}/#/experiments/1/runs"), first + process.stdout.read()
    assert answers(f"http://127.0.0.1:{mlflow}/health") and answers(f"http://127.0.0.1:{prefect}/api/health")
    with urllib.request.urlopen(f"http://127.0.0.1:{prefect}/ui-settings") as asked:  # where its pages look for data
        assert json.load(asked)["api_url"] == f"http://127.0.0.1:{prefect}/api"
    found = {check["name"]: check for check in desk.json("doctor")["checks"]}
    assert found["prefect"]["found"] == f"http://127.0.0.1:{prefect}/api answers"
    same_traces_by_server_and_database(MlflowClient(f"http://127.0.0.1:{mlflow}"), desk)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    psutil.wait_procs(family, timeout=30)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not (desk.folder / ".rollbook/servers.json").exists()


def same_traces_by_server_and_database(served: MlflowClient, desk: Any) -> None:
    """Sent to the server, then to its database: the second sending changes nothing."""
    tables = record(Ledger(desk.ledger.store, "hand"))
    experiment = served.create_experiment("hand")
    place = Place(experiment, served.create_run(experiment).info.run_id, "hand", 0, tables.rollouts)
    assert TraceSender(served).send(place, tables, 1.0, Event()) == Sent(5, 0, 1.0)
    first = {name: t.to_dict() for name, t in by_trajectory(served, experiment, place.mlflow_run).items()}
    assert sorted(first) == ["A/0", "A/1", "B/0", "B/1", "C/0"]
    assert [span["name"] for span in first["B/0"]["data"]["spans"]][2:5] == ["assistant", "add", "clock"]
    assert len(first["A/0"]["info"]["assessments"]) == 3 and first["C/0"]["info"]["state"] == "ERROR"
    TraceSender(MlflowClient(f"sqlite:///{desk.folder}/.rollbook/mlflow.db")).send(place, tables, 1.0, Event())
    again = by_trajectory(served, experiment, place.mlflow_run)
    assert {name: trace.to_dict() for name, trace in again.items()} == first


def test_doctor_without_servers(desk: Callable[[str], Any]) -> None:
    mine = desk("doctor")
    report = json.loads(mine.rollbook("doctor", "--json"))
    assert report["ok"]
    found = {check["name"]: check["found"] for check in report["checks"]}
    assert set(found) == {"python", "packages", "machine", "gpu", "home", "store", "ray", "mlflow", "prefect"}
    assert found["python"].startswith("3.12") and "torch 2.14.1" in found["packages"]
    assert "can be written" in found["store"] and "each run starts one" in found["prefect"]
    said = mine.rollbook("doctor", "--store", "/proc/nothing", code=1)
    assert "fails" in said and "cannot be written" in said
