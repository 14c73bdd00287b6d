"""Every fault that can be done to a run's files is found and named, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.audit import Audit, audit
from data.checkpoints import Checkpoints
from data.ledger import Fork, Ledger
from data.store import Store
from tests.data.places import locally_and_on_s3, vandalise

Build = Callable[..., Any]


@pytest.fixture
def made(chain: Build, tmp_path: Path) -> Any:
    """Two iterations, the first state of them kept: 2 bytes in one file, nothing in another."""
    made = chain(2)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "moments").write_bytes(b"mm")
    (tmp_path / "state" / "empty").write_bytes(b"")
    Checkpoints(made.ledger).keep(made.made[0, "train"], tmp_path / "state", {})
    return made


def faults(ledger: Ledger) -> list[str]:
    return list(audit(ledger).faults)


@locally_and_on_s3
def test_a_sound_run_and_what_it_counts(made: Any) -> None:
    told: list[tuple[int, int]] = []
    found: Audit = audit(made.ledger, lambda done, total: told.append((done, total)))
    assert found.faults == ()
    counts = {kind.kind: (kind.manifests, kind.files) for kind in found.kinds}
    assert counts == {
        "advantages": (2, 0),
        "checkpoint": (1, 2),
        "policy": (4, 2),  # two published, the base and the imported one
        "replays": (2, 0),
        "rewards": (2, 2),
        "rollouts": (2, 2),
        "state": (2, 0),
    }
    assert {kind.kind: kind.bytes for kind in found.kinds}["checkpoint"] == 2
    total = sum(kind.bytes for kind in found.kinds)
    assert told[-1] == (total, total) and len(told) == 8


@locally_and_on_s3
def test_missing_altered_and_grown_files_are_named(made: Any, store: Store) -> None:
    rollouts, weights = made.made[0, "generate"].files[0], made.made[1, "publish"].files[0]
    rewards = made.made[1, "score"].files[0]
    data = store.read_bytes(store.path_of(rollouts.uri))
    vandalise(store, rollouts.uri, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    vandalise(store, weights.uri, None)
    vandalise(store, rewards.uri, store.read_bytes(store.path_of(rewards.uri)) + b"x")
    found = faults(made.ledger)
    expected = {rollouts.uri: "altered", rewards.uri: "altered", weights.uri: "missing, but a manifest lists it"}
    assert len(found) == 3
    assert all(any(fault.startswith(f"{uri}: {what}") for fault in found) for uri, what in expected.items())


def test_a_lost_manifest_is_missed_by_what_was_made_of_it(made: Any, store: Store) -> None:
    lost = made.made[0, "score"].uri
    vandalise(store, lost, None)
    (fault,) = faults(made.ledger)
    assert fault.startswith(f"{lost}: missing, but ") and "000000/advantages" in fault


def test_a_changed_manifest_is_found_by_its_key_and_by_those_after_it(made: Any, store: Store) -> None:
    uri = made.made[0, "replay"].uri
    raw = json.loads(store.read_bytes(store.path_of(uri)))
    vandalise(store, uri, json.dumps(raw | {"seed": 1}).encode())
    (fault,) = faults(made.ledger)
    assert fault.startswith(f"{uri}: altered: its key is not")
    vandalise(store, uri, json.dumps(raw | {"content_digest": "other"}).encode())
    found = faults(made.ledger)
    assert len(found) == 2  # advantages and train were made from it
    assert all(fault.startswith(f"{uri}: altered: its content digest is not what ") for fault in found)
    vandalise(store, uri, b"{")
    assert any(fault.startswith(f"{uri}: not a manifest") for fault in faults(made.ledger))


def test_a_fork_is_checked_with_what_it_has_of_its_parent(made: Any, chain: Build, store: Store) -> None:
    """Up to the second iteration's replay; a fault after that is the parent's alone."""
    fork = chain(0, Ledger(store, "branch"), fork=Fork(run="sort", iteration=1, step="replay")).ledger
    vandalise(store, made.made[1, "score"].files[0].uri, b"x")
    vandalise(store, made.made[1, "publish"].files[0].uri, b"x")
    (fault,) = faults(fork)
    assert fault.startswith(made.made[1, "score"].files[0].uri)
    assert len(faults(made.ledger)) == 2
