"""Which training states stay, how one is found, and that nothing else is ever removed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.checkpoints import Checkpoints, kept, way_to
from data.config import CheckpointConfig
from data.ledger import Ledger, Request
from data.manifest import Manifest, ManifestError
from data.store import Store
from tests.data.places import everywhere

LIVE = [2, 3, 4, 5, 6]
REWARDS = {2: 0.2, 3: 0.9, 4: 0.9, 5: 0.1}  # of the policies of these states; that of 6 has sampled nothing yet


@pytest.mark.parametrize(
    "settings, tagged, stays",
    [
        ({}, [], {5, 6}),
        ({"keep_last": 4}, [], {3, 4, 5, 6}),
        ({"keep_every": 3}, [], {2, 5, 6}),  # after 3 and 6 iterations
        ({}, [3, 40], {3, 5, 6}),
        ({"keep_best": True}, [], {3, 5, 6}),  # .9 twice: the earlier
        ({"keep_every": 5, "keep_best": True}, [2], {2, 3, 4, 5, 6}),
    ],
)
def test_what_stays(settings: dict[str, Any], tagged: list[int], stays: set[int]) -> None:
    assert kept(LIVE, CheckpointConfig(**settings), tagged, REWARDS.get) == stays


def test_best_of_unscored_states_is_none() -> None:
    assert kept([1, 2], CheckpointConfig(keep_best=True), [], {}.get) == {1, 2}
    assert kept([], CheckpointConfig(keep_best=True), [], {}.get) == set()


@pytest.fixture
def train(ledger: Ledger) -> Callable[..., Manifest]:
    """Record a train step of an iteration, made from a state; no state of it is kept."""

    def record(iteration: int, before: Manifest, digest: str, run: Ledger = ledger) -> Manifest:
        request = Request("train", 1, "state", {"state": before})
        return run.writer(run.at(iteration, "train"), request).commit(content_digest=digest)

    return record


@pytest.fixture
def policy(ledger: Ledger) -> Manifest:
    request = Request("import_model", 1, "policy")
    return ledger.writer(ledger.shared(request), request).commit(content_digest="p0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "state/deep").mkdir(parents=True)
    (tmp_path / "state/weights").write_bytes(b"w" * 100)
    (tmp_path / "state/deep/moments").write_bytes(b"m" * 200)
    return tmp_path / "state"


@everywhere
def test_kept_states_are_found_and_only_they_are_removed(
    store: Store, ledger: Ledger, train: Callable[..., Manifest], policy: Manifest, folder: Path, tmp_path: Path
) -> None:
    checkpoints, states = Checkpoints(ledger), [policy]
    for k in range(5):
        states.append(train(k, states[-1], f"s{k}"))
        made = checkpoints.keep(states[-1], folder, {"threads": 2})
        assert made.content_digest == f"s{k}" and made.execution == {"threads": 2}
    checkpoints.tag("good", 1)
    gone = [store.path_of(e.uri) for k in (0, 2) for e in checkpoints.find(states[k + 1]).files]
    assert checkpoints.retain(CheckpointConfig()) == [0, 2]
    assert checkpoints.live() == [1, 3, 4]
    assert not any(store.exists(path) for path in gone) and len(gone) == 4
    assert [checkpoints.find(state) is not None for state in states[1:]] == [False, True, False, True, True]
    assert [ledger.find(ledger.at(k, "train")) for k in range(5)] == states[1:]  # the record of each is still there
    copy = store.local_copy(checkpoints.find(states[4]).files, tmp_path / "cache")
    assert (copy / "deep/moments").read_bytes() == b"m" * 200
    assert checkpoints.retain(CheckpointConfig()) == []
    checkpoints.untag("good")
    assert checkpoints.retain(CheckpointConfig()) == [1]


def test_way_to_a_state_begins_at_the_nearest_that_is_kept(
    ledger: Ledger, train: Callable[..., Manifest], policy: Manifest, folder: Path
) -> None:
    s0 = train(0, policy, "s0")
    s1 = train(1, s0, "s1")
    s2 = train(2, s1, "s2")
    assert way_to(ledger, s2) == (policy, [s0, s1, s2])
    kept_0 = Checkpoints(ledger).keep(s0, folder, {})
    assert way_to(ledger, s2) == (kept_0, [s1, s2])
    assert way_to(ledger, s0) == (kept_0, [])
    assert way_to(ledger, policy) == (policy, [])


def test_way_leads_through_the_run_that_a_state_came_from(
    store: Store, ledger: Ledger, train: Callable[..., Manifest], policy: Manifest, folder: Path
) -> None:
    s0 = train(0, policy, "s0")
    kept_0 = Checkpoints(ledger).keep(s0, folder, {})
    fork = Ledger(store, "fork")
    s1 = train(1, s0, "f1", run=fork)
    assert way_to(fork, s1) == (kept_0, [s1])


def test_a_state_of_another_content_is_not_taken(
    ledger: Ledger, train: Callable[..., Manifest], policy: Manifest, folder: Path
) -> None:
    s0 = train(0, policy, "s0")
    Checkpoints(ledger).keep(s0, folder, {})
    assert Checkpoints(ledger).find(s0.model_copy(update={"content_digest": "other"})) is None


def test_a_gap_in_the_record_is_named(
    store: Store, ledger: Ledger, train: Callable[..., Manifest], policy: Manifest
) -> None:
    s0 = train(0, policy, "s0")
    s1 = train(1, s0, "s1")
    store.remove([store.path_of(s0.uri)])
    with pytest.raises(ManifestError, match=r"000000/train/manifest\.json: missing, but a later step"):
        way_to(ledger, s1)


def test_tags(ledger: Ledger) -> None:
    checkpoints = Checkpoints(ledger)
    assert checkpoints.tags() == {}
    checkpoints.tag("a", 3)
    checkpoints.tag("a", 3)
    checkpoints.tag("b", 3)
    assert checkpoints.tags() == {"a": 3, "b": 3}
    with pytest.raises(FileExistsError, match="tag 'a' of 'sort': names iteration 3; remove it first"):
        checkpoints.tag("a", 4)
    checkpoints.untag("a")
    checkpoints.tag("a", 4)
    assert checkpoints.tags() == {"a": 4, "b": 3}
    with pytest.raises(LookupError, match="tag 'c': run 'sort' has a, b"):
        checkpoints.untag("c")
    with pytest.raises(ValueError, match=r"tag '\.\./x'"):
        checkpoints.tag("../x", 1)
