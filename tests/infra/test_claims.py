"""Drivers of one run under several homes: the last to come goes on, the others stop and name it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from data.ledger import Ledger
from data.store import Store
from infra.claims import Claim
from infra.driver import Holder, RunBusy
from tests.seaweed import ObjectStore


def claims(store: Store, count: int) -> list[Claim]:
    return [Claim(Ledger(store, "mine"), Holder(pid, f"host-{pid}", 0.0)) for pid in range(count)]


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return Store(f"file://{tmp_path}")
    made: ObjectStore = request.getfixturevalue("s3")
    return Store(made.place(), made.endpoint)


def test_last_to_come_goes_on_and_the_first_names_it(store: Store) -> None:
    first, second = claims(store, 2)
    first.hold()
    first.hold()
    second.hold()
    with pytest.raises(RunBusy, match=r"process 1 on host-1 .*came later, so this one stops"):
        first.hold()
    second.hold()
    third = claims(store, 3)[2]  # the second was killed: it stands in nobody's way
    third.hold()
    third.hold()
    recorded = [json.loads(store.read_bytes(f"mine/drivers/{n:06d}/claim.json"))["pid"] for n in (1, 2, 3)]
    assert recorded == [0, 1, 2]


def test_of_claims_made_at_once_one_holds(store: Store) -> None:
    """4 drivers released by a barrier, each looking twice: three stop, at the first look or the second."""
    for number in range(20 if store.local else 3):
        place = Store(f"{store.url}/{number}", store.endpoint)
        barrier, stopped = threading.Barrier(4), []
        threads = [threading.Thread(target=twice, args=(c, barrier, stopped.append)) for c in claims(place, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(stopped) == 3 and all("is driven by process" in said for said in stopped), stopped


def twice(claim: Claim, barrier: threading.Barrier, tell: Callable[[str], None]) -> None:
    barrier.wait()
    busy = None
    try:
        claim.hold()
    except RunBusy as found:
        busy = found
    barrier.wait()
    try:
        if busy is None:
            claim.hold()
    except RunBusy as found:
        busy = found
    if busy is not None:
        tell(str(busy))
