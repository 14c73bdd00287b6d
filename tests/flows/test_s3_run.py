"""The small run with its store on S3, on a Ray head that is a process of its own: equal to its twin in a folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

from data.ledger import Ledger
from data.store import Store
from tests.seaweed import SECRET_KEY, ObjectStore, free_ports

RAY_TOKEN = "5ec4e7" * 10 + "0000"  # 64 hexadecimal digits
RAY_OWN_PORTS = range(10002, 20000)  # Ray gives these to its workers


@dataclass(frozen=True)
class Elsewhere:
    """A finished run whose store and Ray are elsewhere."""

    desk: Any
    store: str  # URL
    ray: str  # address
    ray_folder: Path  # of its logs
    said: str


@contextmanager
def ray_head(environment: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """A Ray head on loopback, as an operator starts one; its address and folder. Ended by its process ids."""
    port = next(port for port in free_ports(20) if port not in RAY_OWN_PORTS)
    folder = Path(tempfile.mkdtemp(prefix="rb-"))  # short: Ray's sockets lie in it
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}",
        "--node-ip-address=127.0.0.1", "--num-cpus=4", "--include-dashboard=false", f"--temp-dir={folder}",
        f"--object-store-memory={128 * 2**20}", "--disable-usage-stats",
    ]  # fmt: skip
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (said := (folder / "head.log").read_text()):
            assert head.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", folder
    finally:
        family = psutil.Process(head.pid).children(recursive=True)
        head.send_signal(signal.SIGTERM)
        _, stubborn = psutil.wait_procs([psutil.Process(head.pid), *family], timeout=20)
        for process in stubborn:
            process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def elsewhere(desk: Callable[..., Any], object_store: ObjectStore) -> Iterator[Elsewhere]:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}
    mine, store = desk("elsewhere", **object_store.environment, **token), object_store.place()
    with ray_head(mine.environment) as (address, folder):
        said = mine.run(f"resources.store={store}", f"resources.ray_address={address}")
        yield Elsewhere(mine, store, address, folder, said)


@pytest.fixture
def on_s3(elsewhere: Elsewhere, s3: ObjectStore) -> Ledger:
    return Ledger(Store(elsewhere.store), "small")


def test_every_digest_equals_that_of_the_twin(finished: tuple[Any, str], on_s3: Ledger) -> None:
    twin = Ledger(Store(f"file://{finished[0].folder}/.rollbook/store"), "small")
    assert on_s3.iterations() == twin.iterations() == [0, 1, 2, 3]
    for iteration in range(4):
        here, there = ({m.step: m for m in ledger.steps(iteration)} for ledger in (on_s3, twin))
        assert {step: m.content_digest for step, m in here.items()} == {s: m.content_digest for s, m in there.items()}
        assert {step: m.key for step, m in here.items()} == {s: m.key for s, m in there.items()}
    assert len(here) == 4  # the evaluation after: generated and scored, by both decodings


def test_weights_reach_the_residents_through_the_cache(elsewhere: Elsewhere, on_s3: Ledger) -> None:
    home = elsewhere.desk.folder / ".rollbook"
    assert not (home / "store").exists()
    published = on_s3.find(on_s3.at(1, "publish"))
    assert published is not None
    before = sorted(home.glob("cache/*"))
    assert (on_s3.store.local_copy(published.files, home / "cache") / "model.safetensors").is_file()
    assert sorted(home.glob("cache/*")) == before and not list(home.glob("cache/*.part"))


def test_second_run_does_nothing(elsewhere: Elsewhere, object_store: ObjectStore) -> None:
    admin, root = object_store.admin(), elsewhere.store.removeprefix("s3://")

    def stamps() -> dict[str, Any]:
        admin.invalidate_cache()
        return {path: (info["ETag"], info["LastModified"]) for path, info in admin.find(root, detail=True).items()}

    before = stamps()
    said = elsewhere.desk.run(f"resources.store={elsewhere.store}", f"resources.ray_address={elsewhere.ray}")
    assert "every step is on record" in said
    assert stamps() == before
    assert not [path for path in before if "/.probe-" in path]


def test_commands_read_it(elsewhere: Elsewhere, object_store: ObjectStore) -> None:
    desk, store = elsewhere.desk, ("--store", elsewhere.store)
    assert [(r["run"], r["status"]) for r in desk.json("ls", *store)["runs"]] == [("small", "complete")]
    one = desk.json("show", "small", "--iteration", "1", *store)["trajectories"]
    whole = desk.json("show", "small", "--trajectory", one[5]["trajectory_id"], *store)
    assert (whole["iteration"], whole["reward"]) == (1, one[5]["reward"])
    assert f"rollbook show small --iteration 2 --store {elsewhere.store}" in elsewhere.said
    found = {c["name"]: c for c in desk.json("doctor", *store, "--ray", elsewhere.ray)["checks"]}
    assert found["store"] == {"name": "store", "ok": True, "found": f"{elsewhere.store} can be written"}
    assert found["ray"]["ok"] and elsewhere.ray in found["ray"]["found"]
    elsewhere_again = ("--store-endpoint", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert "does not answer" in desk.rollbook("ls", *store, *elsewhere_again, code=1)


def test_mlflow_points_at_the_store(elsewhere: Elsewhere, on_s3: Ledger) -> None:
    client = MlflowClient(f"sqlite:///{elsewhere.desk.folder}/.rollbook/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rollbook"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in runs if r.data.tags["rollbook.role"] == "run"]
    assert parent.info.status == "FINISHED" and parent.data.tags["rollbook.store"] == elsewhere.store
    assert parent.data.params["resources.store"] == elsewhere.store
    versions = client.search_model_versions("name = 'small'")
    assert {v.source for v in versions} == {f"{elsewhere.store}/small/{k:06d}/publish" for k in range(3)}


def test_the_secret_is_nowhere(elsewhere: Elsewhere, object_store: ObjectStore) -> None:
    """AWS_SECRET_ACCESS_KEY was set for driver and workers. Searched: manifests, tables, weights; run log, MLflow's and
    Prefect's databases and artifacts, the cache; Ray's logs; what was printed. Ray's own token likewise."""
    stored = object_store.objects(elsewhere.store)
    assert len(stored) > 30 and any(path.endswith("manifest.json") for path in stored)
    secret = re.compile(f"{re.escape(SECRET_KEY)}|{RAY_TOKEN}".encode())
    assert secret.search(b"x" + SECRET_KEY.encode()) and secret.search(RAY_TOKEN.encode())
    assert [path for path, data in stored.items() if secret.search(data)] == []
    kept = [path for path in (elsewhere.desk.folder / ".rollbook").rglob("*") if path.is_file()]
    assert {"mlflow.db", "prefect.db", "run.log", "preview.md"} <= {path.name for path in kept}
    logs = [path for path in elsewhere.ray_folder.rglob("*") if path.is_file()]
    assert any(path.name.startswith("worker-") for path in logs) and any("gcs_server" in path.name for path in logs)
    assert [path for path in [*kept, *logs] if secret.search(path.read_bytes())] == []
    assert not secret.search(elsewhere.said.encode())


def test_urls_with_a_secret_and_local_stores_with_a_remote_ray_are_refused(desk: Callable[..., Any]) -> None:
    mine = desk("refused")
    endpoint = ("resources.store=s3://bucket/x", "resources.store_endpoint=http://me:hid-1den@host:1")
    for settings in (("resources.store=s3://AK:hid-1den@bucket/x",), endpoint):
        said = mine.run(*settings, code=1)
        assert "holds credentials" in said and "AWS_PROFILE" in said and "hid-1den" not in said
    assert "hid-1den" not in (said := mine.rollbook("ls", "--store", "s3://AK:hid-1den@bucket", code=1)), said
    said = mine.run("resources.ray_address=127.0.0.1:6379", f"resources.store=file://{mine.folder}", code=1)
    assert "local store" in said and "s3://" in said
    left = [path for path in mine.folder.rglob("*") if path.is_file() and b"hid-1den" in path.read_bytes()]
    assert left == [] and not os.path.exists(mine.folder / ".rollbook/store")
