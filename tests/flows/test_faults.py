"""Runs whose store, disk or servers break on the way: they wait, or stop with one line, and end as the undisturbed."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from data.ledger import Ledger
from data.store import Store
from infra.home import Home
from infra.servers import serving
from tests.disks import small_disk
from tests.faults import Answers, Proxy, Reset, proxy_to
from tests.seaweed import ObjectStore, free_ports

TWO_MINUTES = 120.0


def digests(ledger: Ledger) -> dict[tuple[int, str], tuple[str, str]]:
    return {(k, m.step): (m.key, m.content_digest) for k in ledger.iterations() for m in ledger.steps(k)}


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@contextmanager
def driven(desk: Any, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """The small run as a process of its own."""
    driver = subprocess.Popen(
        desk.command(*desk.small(*overrides)), cwd=desk.folder, env=desk.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


def wait_until(seen: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not seen():
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def outcome(driver: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was said, which holds no traceback."""
    said, _ = driver.communicate(timeout=400)
    assert "Traceback" not in said, said
    return driver.returncode, said


def lines(said: str, begin: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(begin)]


# The store


@pytest.fixture
def proxy(s3: ObjectStore) -> Iterator[Proxy]:
    with proxy_to(port_of(s3.endpoint)) as made:
        yield made


@pytest.fixture
def on_s3(desk: Callable[..., Any], s3: ObjectStore, proxy: Proxy) -> tuple[Any, str]:
    """A user whose store is behind the proxy, and its URL."""
    return desk("faulty", **{**s3.environment, "AWS_ENDPOINT_URL": proxy.url}), s3.place()


@pytest.mark.slow
def test_a_store_that_fails_for_a_while(on_s3: tuple[Any, str], proxy: Proxy, finished: tuple[Any, str]) -> None:
    """The writes of a train step fail, which a resident meets, and the answers of three commits are lost."""
    desk, store = on_s3
    with (
        proxy.breaking(Answers("PUT", "/000001/train/", times=4, status=503)) as failing,
        proxy.breaking(Reset("PUT", r"manifest\.json", times=3, done=True)) as losing,
    ):
        said = desk.run(f"resources.store={store}")
    assert (failing.count, losing.count) == (4, 3)
    waiting = lines(said, f"store {store}: {proxy.url} answers 503")
    assert waiting and waiting[0].endswith("; trying for another 120 s")  # said in the resident, printed by the driver
    assert digests(Ledger(Store(store, proxy.url), "small")) == digests(finished[0].ledger)


@pytest.mark.slow
def test_a_store_that_fails_for_good_stops_the_run_and_the_same_command_ends_it(
    on_s3: tuple[Any, str], proxy: Proxy, finished: tuple[Any, str]
) -> None:
    desk, store = on_s3
    settings = (f"resources.store={store}", "resources.store_patience_s=2")
    with proxy.breaking(Answers("PUT", "/000001/train/", status=503)) as broken:
        said = desk.run(*settings, code=1)
    assert broken.count > 1
    assert "Traceback" not in said
    (waiting,) = lines(said, f"store {store}: {proxy.url} answers 503")
    assert waiting.endswith("; trying for another 2 s")
    (error,) = lines(said, "error: ")
    assert "/000001/train/" in error and f"cannot be written ({proxy.url} answers 503" in error
    assert error.endswith("wait until it is well; the same command then goes on")
    ledger, twin = Ledger(Store(store, proxy.url), "small"), digests(finished[0].ledger)
    before = digests(ledger)
    assert (1, "advantages") in before and (1, "train") not in before
    assert before.items() < twin.items()
    assert "going on with train of iteration 1" in desk.run(*settings)
    assert digests(ledger) == twin


@pytest.mark.slow
def test_a_store_gone_for_30_s_is_waited_for(on_s3: tuple[Any, str], proxy: Proxy, finished: tuple[Any, str]) -> None:
    desk, store = on_s3
    with driven(desk, f"resources.store={store}") as driver:
        wait_until(lambda: any("/000001/generate/manifest.json" in request for request in proxy.seen), driver)
        proxy.go_away()
        time.sleep(30)
        assert driver.poll() is None
        proxy.come_back()
        code, said = outcome(driver)
    assert code == 0
    assert len(lines(said, f"store {store}: {proxy.url} does not answer: EndpointConnectionError; trying for")) in (
        1,
        2,
    )
    assert lines(said, f"store {store} answers again after ")
    assert digests(Ledger(Store(store, proxy.url), "small")) == digests(finished[0].ledger)


@pytest.mark.slow
@pytest.mark.parametrize("whole_home", [False, True])
def test_a_disk_that_gets_full(
    desk: Callable[..., Any], tmp_path: Path, finished: tuple[Any, str], whole_home: bool
) -> None:
    """Room for about one iteration; with logs and databases on the same disk likewise."""
    with small_disk(tmp_path / "disk", "24m" if whole_home else "12m") as disk:
        mine = desk("full", **({"ROLLBOOK_HOME": str(disk.folder / "home")} if whole_home else {}))
        store = f"file://{disk.folder}/store"
        with driven(mine, f"resources.store={store}") as driver:
            code, said = outcome(driver)
        assert code == 1
        (error,) = lines(said, "error: ")
        assert "(No space left on device); make room on that disk; the same command then goes on" in error
        ledger, twin = Ledger(Store(store), "small"), digests(finished[0].ledger)
        before = digests(ledger)
        assert (0, "train") in before and before.items() < twin.items()
        disk.remount("size=400m")
        mine.run(f"resources.store={store}")
        assert digests(ledger) == twin


# The servers


@pytest.fixture
def servers(desk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Proxy, Proxy]]:
    """A user whose MLflow and Prefect, those of `rollbook up`, are behind a proxy each."""
    mine = desk("served")
    home = Home(mine.folder / ".rollbook")
    home.prepare()
    for name, value in mine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREFECT_HOME", str(home.prefect))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with (
        serving(home, *free_ports(2)) as (running, _),
        proxy_to(port_of(running.mlflow_url)) as mlflow,
        proxy_to(port_of(running.prefect_url)) as prefect,
    ):
        addresses = {"MLFLOW_TRACKING_URI": mlflow.url, "PREFECT_API_URL": f"{prefect.url}/api"}
        yield type(mine)(mine.folder, addresses), mlflow, prefect


def published(desk: Any, iteration: int) -> Callable[[], bool]:
    return (desk.folder / f".rollbook/store/small/{iteration:06d}/publish/manifest.json").exists


@pytest.mark.slow
def test_prefect_gone_for_two_minutes_holds_nothing_up(
    servers: tuple[Any, Proxy, Proxy], finished: tuple[Any, str]
) -> None:
    desk, _, prefect = servers
    with driven(desk) as driver:
        wait_until(published(desk, 0), driver)
        prefect.go_away()
        gone = time.monotonic()
        wait_until(published(desk, 2), driver)
        assert time.monotonic() - gone < TWO_MINUTES
        time.sleep(TWO_MINUTES - (time.monotonic() - gone))
        assert driver.poll() is None  # it waits for Prefect to take its end
        prefect.come_back()
        code, said = outcome(driver)
    assert code == 0
    (line,) = lines(said, "Prefect: ")
    assert "Training goes on" in line
    assert digests(desk.ledger) == digests(finished[0].ledger)


@pytest.mark.slow
def test_prefect_gone_for_good(servers: tuple[Any, Proxy, Proxy]) -> None:
    """All is on record all the same; a new run says at once what is wrong."""
    desk, _, prefect = servers
    with driven(desk) as driver:
        wait_until(published(desk, 0), driver)
        prefect.go_away()
        code, said = outcome(driver)
    assert code == 0
    assert lines(said, "MLflow: ") == []  # whose server takes everything
    assert len(lines(said, "Prefect: ")) == 1
    (line,) = lines(said, "Prefect does not answer any more")
    assert "All is on record" in line
    said = desk.run("run=other", code=1)
    assert lines(
        said, f"error: Prefect at {prefect.url}/api does not answer ([Errno 111] Connection refused); start it"
    )
    assert not (desk.folder / ".rollbook/store/other").exists()


@pytest.mark.slow
def test_mlflow_gone_for_two_minutes_is_told_later(
    servers: tuple[Any, Proxy, Proxy], finished: tuple[Any, str]
) -> None:
    desk, mlflow, _ = servers
    with driven(desk) as driver:
        wait_until(published(desk, 0), driver)
        mlflow.go_away()
        gone = time.monotonic()
        code, said = outcome(driver)
    assert code == 0
    (line,) = lines(said, "MLflow: ConnectionRefusedError: ")
    assert "Training goes on; `rollbook sync-tracking small` tells MLflow later" in line
    assert digests(desk.ledger) == digests(finished[0].ledger)
    time.sleep(max(0.0, TWO_MINUTES - (time.monotonic() - gone)))
    mlflow.come_back()
    with mlflow.breaking(Reset("POST", "runs/create", times=1, done=True)) as broken:
        assert "3 iterations" in desk.rollbook("sync-tracking", "small")
    first = recorded(mlflow.url)
    assert broken.count == 1
    assert "3 iterations" in desk.rollbook("sync-tracking", "small")
    assert recorded(mlflow.url) == first


def recorded(tracking_uri: str) -> list[tuple[str, str]]:
    """What MLflow has of iterations: each once and whole."""
    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name("rollbook")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`rollbook.complete` = 'true'")
    assert sorted(run.data.tags["rollbook.iteration"] for run in runs) == ["0", "1", "2"]
    return sorted((run.info.run_id, run.data.tags["rollbook.iteration"]) for run in runs)
