"""The small run with MLflow and Prefect on PostgreSQL, and their servers on it. Debian's server, started here."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from data.ledger import Ledger
from data.store import Store
from infra.servers import answers
from tests.scheduling import await_true, serving
from tests.seaweed import free_ports

pytestmark = pytest.mark.slow
PASSWORD = "planted-pg-77aa01"


@dataclass(frozen=True)
class Postgres:
    port: int

    def url(self, database: str, driver: str = "postgresql") -> str:
        """Without the password, which both drivers find in PGPASSWORD."""
        return f"{driver}://rollbook@127.0.0.1:{self.port}/{database}"

    def rows(self, database: str, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url(database), password=PASSWORD) as connection, connection.cursor() as cursor:
            cursor.execute(query.encode())
            return cursor.fetchall()


def _programs() -> Path:
    """Where initdb and postgres are. Debian keeps them off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found and (initdb := shutil.which("initdb")):
        found = [Path(initdb)]
    if not found:
        pytest.skip("PostgreSQL's server is not installed: apt-get install -y postgresql")
    return found[-1].parent


def _user() -> str:
    """PostgreSQL refuses to run as root."""
    if os.getuid():
        return pwd.getpwuid(os.getuid()).pw_name
    if "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
        pytest.skip("running as root, which PostgreSQL refuses, and there is no user postgres to run it as")
    return "postgres"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    programs, user, folder = _programs(), _user(), Path(tempfile.mkdtemp(prefix="pg-"))
    (port,) = free_ports(1)
    (folder / "password").write_text(PASSWORD)
    as_user: dict[str, Any] = {"cwd": folder}
    if os.getuid() == 0:
        for path in (folder, folder / "password"):
            shutil.chown(path, user)
        as_user |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    log = (folder / "log").open("wb")
    initdb = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", "rollbook", "-A", "scram-sha-256"]
    subprocess.run([*initdb, "--no-sync", "--pwfile", str(folder / "password")], check=True, stdout=log, **as_user)
    command = [str(programs / "postgres"), "-D", str(folder / "data"), "-h", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen([*command, "-k", str(folder)], stdout=log, stderr=log, **as_user)
    try:
        connection = _connect(port, server, folder / "log")
        connection.autocommit = True
        with connection.cursor() as cursor:
            for database in ("mlflow", "prefect"):
                cursor.execute(f"create database {database}".encode())
        connection.close()
        yield Postgres(port)
    finally:
        server.send_signal(signal.SIGINT)  # fast shutdown
        server.wait(60)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _connect(port: int, server: subprocess.Popen[bytes], log: Path) -> psycopg.Connection[Any]:
    deadline = time.monotonic() + 60
    while True:
        try:
            return psycopg.connect(host="127.0.0.1", port=port, user="rollbook", password=PASSWORD, dbname="postgres")
        except psycopg.OperationalError:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


@pytest.fixture(scope="module")
def recorded(desk: Callable[..., Any], postgres: Postgres) -> Any:
    """A run of one iteration whose records go to PostgreSQL."""
    mine = desk(
        "postgres",
        MLFLOW_TRACKING_URI=postgres.url("mlflow"),
        PREFECT_SERVER_DATABASE_CONNECTION_URL=postgres.url("prefect", "postgresql+asyncpg"),
        PGPASSWORD=PASSWORD,
    )
    mine.run("iterations=1")
    return mine


def test_both_databases_hold_the_run(recorded: Any, postgres: Postgres) -> None:
    assert postgres.rows("prefect", "select name, state_type::text from flow_run") == [("train-small", "COMPLETED")]
    tasks = {name.rsplit("-", 1)[0] for (name,) in postgres.rows("prefect", "select name from task_run")}
    assert {"generate", "train", "publish", "iteration-0"} <= tasks
    runs = postgres.rows("mlflow", "select name, status from runs order by name")
    assert runs == [("small", "FINISHED"), ("small/0", "FINISHED")]
    assert postgres.rows("mlflow", "select count(*) from model_versions") == [(1,)]
    assert not list((recorded.folder / ".rollbook").rglob("*.db"))


def test_it_made_what_a_run_on_sqlite_makes(recorded: Any, finished: tuple[Any, str]) -> None:
    digests = []
    for folder in (recorded.folder, finished[0].folder):
        ledger = Ledger(Store(f"file://{folder}/.rollbook/store"), "small")
        digests.append({m.step: m.content_digest for m in ledger.steps(0)})
    assert digests[0] == digests[1]


def test_the_password_is_not_told(recorded: Any, postgres: Postgres) -> None:
    kept = [path for path in (recorded.folder / ".rollbook").rglob("*") if path.is_file()]
    assert [path for path in kept if PASSWORD.encode() in path.read_bytes()] == []
    url = postgres.url("mlflow").replace("rollbook@", f"rollbook:{PASSWORD}@")
    in_url = type(recorded)(recorded.folder, {**recorded.variables, "MLFLOW_TRACKING_URI": url})
    said = in_url.rollbook("doctor", "--json")
    assert "postgresql://rollbook:***@127.0.0.1" in said and PASSWORD not in said


def test_the_servers_serve_it(recorded: Any) -> None:
    mlflow, prefect = free_ports(2)
    process = subprocess.Popen(
        recorded.command("up", "--mlflow-port", str(mlflow), "--prefect-port", str(prefect)),
        cwd=recorded.folder, env=recorded.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"MLflow   http://127.0.0.1:{mlflow}/")
        assert answers(f"http://127.0.0.1:{mlflow}/health") and answers(f"http://127.0.0.1:{prefect}/api/health")
        found = {check["name"]: check for check in recorded.json("doctor")["checks"]}
        assert found["mlflow"]["ok"] and found["prefect"]["ok"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def test_a_cron_fires_on_it(recorded: Any, postgres: Postgres) -> None:
    """The run goes on from one iteration; the server keeps schedule, flow runs and events in PostgreSQL."""
    with serving(recorded) as prefect:
        recorded.rollbook("deploy", "small", "--cron", "* * * * *")
        fired = "select count(*) from flow_run where name = 'continue-small' and state_type = 'COMPLETED'"
        await_true(lambda: postgres.rows("prefect", fired) != [(0,)], 240)
        assert prefect.wait(prefect.start("prune-run/small")) == ("Completed", "")
        recorded.rollbook("deploy", "small", "--remove")
    assert recorded.ledger.find(recorded.ledger.at(1, "publish")) is not None
    assert not list((recorded.folder / ".rollbook").rglob("*.db"))
