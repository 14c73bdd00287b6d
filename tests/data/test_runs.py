"""Recorded runs from Python: what is given, and what is said of what is not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.ledger import Ledger
from data.manifest import ManifestError
from data.runs import RecordedRun, open_run
from data.store import Store
from tests.data.places import locally_and_on_s3, vandalise

Build = Callable[..., Any]


@pytest.fixture
def run(chain: Build, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path))
    chain(2)
    return open_run("sort", store.url, store.endpoint)


@locally_and_on_s3
def test_tables_manifests_metrics_and_policies(run: RecordedRun) -> None:
    """Rewards of iteration 1 are 1 and 1, of iteration 0 they are 0 and 1; see Chain."""
    assert run.iterations == [0, 1] and run.config["lr"] == 0.5
    first = run.iteration(0)
    assert first.table("rewards", ["trajectory_id", "reward"]).to_pylist() == [
        {"trajectory_id": "P0@0/0", "reward": 0.0},
        {"trajectory_id": "P1@1/0", "reward": 1.0},
    ]
    assert run.iteration(1).table("rollouts").num_rows == 2
    assert first.metrics["reward/mean"] == 0.5 and first.metrics["seconds/score"] == 0.25
    assert first.steps == ["generate", "score", "replay", "advantages", "train", "publish"]
    assert first.manifest("train").content_digest == "train 0"
    assert (run.iteration(1).policy() / "weights").read_text() == "weights 1"


def test_the_default_store_is_the_homes(chain: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(1, Ledger(Store(str(tmp_path / "mine" / "store")), "sort"))
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path / "mine"))
    assert open_run("sort").iterations == [0]
    monkeypatch.delenv("ROLLBOOK_HOME")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").rename(tmp_path / ".rollbook")
    assert open_run("sort").iterations == [0]


def test_plain_errors(run: RecordedRun, store: Store) -> None:
    with pytest.raises(LookupError, match=r"run 'sore': not on record .* did you mean 'sort'"):
        open_run("sore", store.url)
    with pytest.raises(LookupError, match="iteration 7 of 'sort': not on record; on record: 0 to 1"):
        run.iteration(7)
    with pytest.raises(LookupError, match="step 'scare' is not on record; it has generate, score"):
        run.iteration(0).manifest("scare")
    with pytest.raises(LookupError, match="no table 'values'; it has rollouts of generate, rewards of score"):
        run.iteration(0).table("values")
    with pytest.raises(LookupError, match="no table 'rewards' of step 'score_greedy'; it has"):
        run.iteration(0).table("rewards", step="score_greedy")
    vandalise(store, run.iteration(0).manifest("score").files[0].uri, None)
    with pytest.raises(ManifestError, match="missing"):
        run.iteration(0).table("rewards")
