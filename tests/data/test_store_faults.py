"""A real S3 server behind a proxy that breaks things: requests end right or in one line, and nothing is half there."""

import logging
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data.ledger import Ledger, Request, read_table
from data.manifest import Manifest, ManifestError
from data.store import Store, StoreError
from data.tables import write_table
from tests.data.places import files_of
from tests.faults import Answers, Fault, Proxy, Reset, Shortened, Slow, Truncated, proxy_to
from tests.seaweed import ObjectStore

BLOCK = bytes(range(256)) * 4096  # 1 MiB
BLOCKS = 20  # a large file: two parts


@dataclass
class Stage:
    """An iteration on record, and its store seen through the proxy and past it."""

    proxy: Proxy
    past: Store
    rollouts: pa.Table
    request: Request
    cache: Path
    made: Manifest = field(init=False)

    def __post_init__(self) -> None:
        self.made = self.commit(self.past)

    def through(self, patience_s: float) -> Store:
        return Store(self.past.url, self.proxy.url, patience_s)

    def commit(self, store: Store) -> Manifest:
        """Enter the rollouts of the next iteration."""
        ledger = Ledger(store, "sort")
        attempt = ledger.writer(ledger.at(len(Ledger(self.past, "sort").iterations()), "generate"), self.request)
        attempt.add_table("rollouts", self.rollouts)
        return attempt.commit()


@pytest.fixture
def proxy(s3: ObjectStore) -> Iterator[Proxy]:
    with proxy_to(int(s3.endpoint.rpartition(":")[2])) as made:
        yield made


@pytest.fixture
def stage(
    s3: ObjectStore, proxy: Proxy, rollouts: pa.Table, request_of: Callable[..., Request], tmp_path: Path
) -> Stage:
    return Stage(proxy, Store(s3.place()), rollouts, request_of(), tmp_path / "cache")


# What a step does with a store; each fails unless what comes out is right.


def find(stage: Stage, store: Store) -> None:
    ledger = Ledger(store, "sort")
    assert ledger.find(ledger.at(0, "generate")) == stage.made


def read_whole(stage: Stage, store: Store) -> None:
    assert read_table(store, stage.made).equals(stage.rollouts)


def read_columns(stage: Stage, store: Store) -> None:
    found = read_table(store, stage.made, ["trajectory_id"], verify=False)
    assert found["trajectory_id"].to_pylist() == ["A/0", "A/1", "B/0", "B/1"]


def copy(stage: Stage, store: Store) -> None:
    folder = store.local_copy(stage.made.files, stage.cache / uuid.uuid4().hex)
    assert (folder / "rollouts-000.parquet").stat().st_size == stage.made.files[0].bytes


def ask(stage: Stage, store: Store) -> None:
    assert store.exists(store.path_of(stage.made.uri)) and not store.exists("sort/nothing")


def list_iterations(stage: Stage, store: Store) -> None:
    assert 0 in Ledger(store, "sort").iterations()


def write(stage: Stage, store: Store) -> None:
    path = f"{uuid.uuid4().hex}/t"
    write_table(store, path, stage.rollouts)
    assert stage.past.read_bytes(path) == stage.past.read_bytes(stage.past.path_of(stage.made.files[0].uri))


def write_large(stage: Stage, store: Store) -> None:
    path = f"{uuid.uuid4().hex}/large"
    with store.open_new(path) as file:
        for _ in range(BLOCKS):
            file.write(BLOCK)
    assert stage.past.read_bytes(path) == BLOCK * BLOCKS


def commit(stage: Stage, store: Store) -> None:
    """A lost answer makes the second request meet the first one's manifest: that is our own."""
    made = stage.commit(store)
    ledger = Ledger(stage.past, "sort")
    assert ledger.find(ledger.at(made.iteration or 0, "generate")) == made
    assert read_table(stage.past, made).equals(stage.rollouts)


# Name -> what is done, and which of its requests meets the fault: method, path.
ACTS: dict[str, tuple[Callable[[Stage, Store], None], str, str]] = {
    "find": (find, "GET", r"manifest\.json"),
    "read": (read_whole, "GET", "parquet"),
    "read columns": (read_columns, "GET", "parquet"),
    "copy": (copy, "GET", "parquet"),
    "ask": (ask, "HEAD", r"manifest\.json"),
    "list": (list_iterations, "GET", "list-type"),
    "write": (write, "PUT", "/t$"),
    "begin parts": (write_large, "POST", r"large\?uploads"),
    "send parts": (write_large, "PUT", "large.*partNumber"),
    "complete parts": (write_large, "POST", "large.*uploadId="),
    "commit": (commit, "PUT", r"manifest\.json"),
}
FAULTS: dict[str, Callable[..., Fault]] = {
    "500": partial(Answers, status=500),
    "503": partial(Answers, status=503),
    "slow": partial(Slow, delay_s=0.2, pause_s=0.01),
    "truncated": partial(Truncated, keep=10),
    "damaged": partial(Shortened, keep=10, unseen=False),
    "reset": Reset,
    "answer lost": partial(Reset, done=True),
}
BODILESS = ("ask", "write", "send parts", "commit")  # their answers cannot be cut
CHECKED = ("find", "read", "copy")  # whole files, which come with S3's checksum


def met(act: str, fault: str) -> bool:
    """Whether a fault of this kind can take place there."""
    return act in CHECKED if fault == "damaged" else not (fault == "truncated" and act in BODILESS)


@pytest.mark.parametrize("act", ACTS)
def test_faults_that_pass_leave_no_trace(stage: Stage, act: str) -> None:
    perform, method, path = ACTS[act]
    for name, make in FAULTS.items():
        if met(act, name):
            with stage.proxy.breaking(make(method, path, times=2)) as broken:
                perform(stage, stage.through(60))
            assert broken.count == 2 or (broken.count and name == "slow"), name  # which is not tried again


@pytest.mark.parametrize("act", ["find", "send parts", "commit"])
def test_a_store_that_was_gone_is_waited_for_and_that_is_said_once(
    stage: Stage, act: str, caplog: pytest.LogCaptureFixture
) -> None:
    def come_back() -> None:
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
        stage.proxy.come_back()

    stage.proxy.go_away()
    back = threading.Thread(target=come_back)
    back.start()
    with caplog.at_level(logging.WARNING, "rollbook"):
        ACTS[act][0](stage, stage.through(60))
    back.join()
    (gone, again) = [record.getMessage() for record in caplog.records if record.name == "rollbook"]
    where = f"store {stage.past.url}: {stage.proxy.url} does not answer: EndpointConnectionError"
    assert gone == f"{where}; trying for another 60 s"
    assert again.startswith(f"store {stage.past.url} answers again after ")


@pytest.mark.parametrize("act", ["find", "copy", "list", "write", "send parts", "commit"])
def test_a_store_that_stays_gone_ends_it_in_one_line(stage: Stage, act: str) -> None:
    perform, method, path = ACTS[act]
    before = files_of(stage.past)
    with stage.proxy.breaking(Answers(method, path, status=503)) as broken:
        said = refusal(perform, stage, 0.3)
    assert broken.count >= 2
    assert f"({stage.proxy.url} answers 503" in said and "the same command then goes on" in said
    assert [path for path in files_of(stage.past) if path not in before and not path.endswith(".parquet")] == []
    perform(stage, stage.through(0))  # afterwards


@pytest.mark.parametrize("fault", ["reset", "truncated", "gone"])
def test_every_kind_of_absence_is_one_line(stage: Stage, fault: str) -> None:
    if fault == "gone":
        stage.proxy.go_away()
        said = refusal(find, stage, 0)
        stage.proxy.come_back()
    else:
        with stage.proxy.breaking(FAULTS[fault]("GET", r"manifest\.json")) as broken:
            said = refusal(find, stage, 0)
        assert broken.count
    assert f".json cannot be read ({stage.proxy.url} does not answer: " in said
    assert "check resources.store_endpoint and the network" in said


FOREVER = {
    (403, "AccessDenied"): "the server refuses these credentials: AccessDenied",
    (404, "NoSuchBucket"): "no bucket 'plain'",
    (403, "QuotaExceeded"): "no room left: ",
    (507, "XMinioStorageFull"): "no room left: ",
    (501, "NotImplemented"): "",
}


@pytest.mark.parametrize(("status", "code"), FOREVER)
def test_what_does_not_pass_is_not_waited_for(stage: Stage, status: int, code: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
    with stage.proxy.breaking(Answers("PUT", "", status=status, body=body)) as broken:
        said = refusal(write, stage, 60)
    assert FOREVER[status, code] in said and broken.count == 1


def refusal(perform: Callable[[Stage, Store], None], stage: Stage, patience_s: float) -> str:
    with pytest.raises(StoreError) as raised:
        perform(stage, stage.through(patience_s))
    said = str(raised.value)
    assert "\n" not in said and said.startswith(f"store {stage.past.url}: ")
    return said


@pytest.mark.parametrize("act", ["find", "read", "read columns", "copy"])
def test_a_body_that_was_cut_unseen_is_never_taken(stage: Stage, act: str) -> None:
    perform, method, path = ACTS[act]
    with (
        stage.proxy.breaking(Shortened(method, path, keep=100)) as broken,
        pytest.raises(ManifestError, match=r"altered"),
    ):
        perform(stage, stage.through(0))
    assert broken.count
    perform(stage, stage.through(0))


def test_an_answer_lost_at_the_commit_gives_this_attempts_manifest(stage: Stage) -> None:
    store = stage.through(60)
    ledger = Ledger(store, "sort")
    attempt = ledger.writer(ledger.at(5, "generate"), stage.request)
    attempt.add_table("rollouts", stage.rollouts)
    with stage.proxy.breaking(Reset("PUT", r"manifest\.json", times=1, done=True)) as broken:
        made = attempt.commit()
    assert broken.count == 1
    assert f"/{attempt.attempt}/" in made.files[0].uri


def test_patience_travels(stage: Stage) -> None:
    store: Any = pickle.loads(pickle.dumps(stage.through(7.5)))
    assert store.patience_s == 7.5
    assert store == replace(store, patience_s=1.0)  # the same place
