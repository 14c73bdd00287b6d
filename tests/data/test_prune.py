"""What is cleared away, and that nothing else is: files are counted before and after."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.audit import audit
from data.checkpoints import Checkpoints
from data.config import CheckpointConfig
from data.ledger import Fork, Ledger, Request, list_runs
from data.prune import (
    DAY_S,
    Removal,
    clear,
    clear_copies,
    forks_of,
    newest_config,
    old_copies,
    strays,
    surplus_states,
    whole_run,
)
from data.store import Store
from tests.data.places import files_of, locally_and_on_s3

Build = Callable[..., Any]
HEX = "0123456789abcdef" * 2


@pytest.fixture
def made(chain: Build, tmp_path: Path) -> Any:
    """Four iterations and the states of all."""
    made = chain(4)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "moments").write_bytes(b"mmm")
    for k in range(4):
        Checkpoints(made.ledger).keep(made.made[k, "train"], tmp_path / "state", {})
    return made


@locally_and_on_s3
def test_states_beyond_the_newest_config(made: Any, store: Store) -> None:
    """The run's own record keeps two of four, and a tag one more; a train step since then says three."""
    checkpoints = Checkpoints(made.ledger)
    assert [removal.name for removal in surplus_states(made.ledger)] == ["sort, iteration 0", "sort, iteration 1"]
    checkpoints.tag("best", 0)
    (removal,) = surplus_states(made.ledger)
    assert (removal.what, removal.bytes, len(removal.paths)) == ("training state", 3, 2)
    assert removal.paths[0] == "sort/checkpoints/000001/manifest.json"
    before = files_of(store)
    clear(store, [removal])
    assert checkpoints.live() == [0, 2, 3]
    assert set(before) - set(files_of(store)) == set(removal.paths)
    assert audit(made.ledger).faults == ()


def test_the_newest_config_counts(made: Any) -> None:
    assert newest_config(made.ledger) == CheckpointConfig()
    later = CheckpointConfig(keep_last=3)
    request = Request("train", 1, "state", execution={"checkpoint": later.model_dump()})
    made.ledger.writer(made.ledger.at(4, "train"), request).commit(content_digest="s4")
    assert newest_config(made.ledger) == later
    assert [removal.name for removal in surplus_states(made.ledger)] == ["sort, iteration 0"]


def put(store: Store, *paths: str) -> None:
    for path in paths:
        assert store.create(path, b"left")


@locally_and_on_s3
def test_files_that_no_manifest_names(made: Any, store: Store) -> None:
    """Of a step on record, of one that is not, shared, half a file, and results of a scratch ledger."""
    before = files_of(store)
    attempts = [f"sort/000001/train/{HEX}/deep/w", f"sort/000009/train/{HEX}/w", f"shared/policy/{'a' * 64}/{HEX}/w"]
    halves = [f"sort/000001/train/.manifest.json.{HEX}", f".probe-{HEX}"]
    scratch = [f"scratch-1/000000/train/{HEX}/w", "scratch-1/000000/train/manifest.json"]
    strangers = ["sort/notes.txt", "other/000000/train/w", "sort/000001/wall.json", f"sort/tags/{HEX}/iteration"]
    put(store, *attempts, *halves, *scratch, *strangers)
    now = time.time() + 10
    assert strays(store, None, now) == []  # younger than a day
    found = strays(store, None, now + DAY_S)
    assert {(removal.what, *removal.paths) for removal in found} == {
        *(("unfinished attempt", path) for path in attempts),
        *(("half a file", path) for path in halves),
        ("scratch results", *scratch),
    }
    assert {path for r in strays(store, "sort", now + DAY_S) for path in r.paths} == {*attempts[:2], halves[0]}
    clear(store, found)
    assert set(files_of(store)) == {*before, *strangers}
    assert audit(made.ledger).faults == ()


def test_an_attempt_stays_while_one_of_its_files_is_young(store: Store) -> None:
    put(store, f"sort/000000/train/{HEX}/a", f"sort/000000/train/{HEX}/b")
    old = time.time() - 2 * DAY_S
    root = Path(store.url.removeprefix("file://"))
    os.utime(root / f"sort/000000/train/{HEX}/a", (old, old))
    assert strays(store, None, time.time()) == []
    os.utime(root / f"sort/000000/train/{HEX}/b", (old, old))
    assert len(strays(store, None, time.time())) == 1


def test_a_run_that_is_called_scratch_is_no_scratch(store: Store, chain: Build) -> None:
    chain(1, Ledger(store, "scratch-2"))
    assert strays(store, None, time.time() + 2 * DAY_S) == []


def test_copies_that_nothing_asked_for(tmp_path: Path) -> None:
    """Three folders, used 1, 3 and 5 hours ago; a part of a download of 9 hours ago; other things stay."""
    now = time.time()
    for name, hours in (("a" * 64, 1), ("b" * 64, 3), ("c" * 64, 5), (f"{'d' * 64}.{HEX}.part", 9), ("spool", 99)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_text("w")
        os.utime(tmp_path / name, (now - 3600 * hours,) * 2)
    before = now - 3600 * 4
    found = old_copies(tmp_path, before)
    assert [folder.name[0] for folder in found] == ["c", "d"]
    os.utime(tmp_path / ("c" * 64), (now, now))  # used since it was listed
    clear_copies(found, before)
    assert sorted(folder.name[0] for folder in tmp_path.iterdir()) == ["a", "b", "c", "s"]
    assert old_copies(tmp_path / "none", now) == []


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_copy_is_young_when_it_was_used(chain: Build, store: Store, tmp_path: Path) -> None:
    policy, cache = chain(1).made[0, "publish"], tmp_path / "copies"
    folder = store.local_copy(policy.files, cache)
    os.utime(folder, (0, 0))
    assert old_copies(cache, time.time() - 60) == [folder]
    assert store.local_copy(policy.files, cache) == folder
    assert old_copies(cache, time.time() - 60) == []


def test_forks_are_named(made: Any, chain: Build, store: Store) -> None:
    chain(0, Ledger(store, "branch"), fork=Fork(run="sort", iteration=1, step="train"))
    assert forks_of(store, "sort") == ["branch"] and forks_of(store, "branch") == []


@locally_and_on_s3
def test_a_whole_run_goes_and_nothing_else(made: Any, chain: Build, store: Store) -> None:
    other = chain(1, Ledger(store, "other"))
    rest = [path for path in files_of(store) if not path.startswith("sort/")]
    removal = whole_run(store, "sort")
    assert removal.paths[-1] == "sort/run.json"
    clear(store, [removal])
    assert files_of(store) == rest
    assert audit(other.ledger).faults == ()


def test_a_run_removed_halfway_is_a_shorter_sound_run(made: Any, store: Store) -> None:
    """Killed after any number of files, what is on record is whole and the run is still listed, until the last file."""
    removal: Removal = whole_run(store, "sort")
    size = len(removal.paths)
    assert size == 1 + 4 * 6 + 4 * 3 + 4 * 2  # run.json, manifests, files of steps, states with a file each
    for path in removal.paths[:-1]:
        store.remove([path])
        assert [record.run for record in list_runs(store)] == ["sort"]
        assert audit(Ledger(store, "sort")).faults == (), path
    again = whole_run(store, "sort")
    assert again.paths == ("sort/run.json",)
    clear(store, [again])
    assert list_runs(store) == []
