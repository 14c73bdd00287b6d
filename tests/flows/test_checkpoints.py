"""Training states over a whole run: the last two stay, a tag keeps one, and one that is gone is made again."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from data.checkpoints import Checkpoints

STEPS = ("generate", "score", "replay", "advantages", "train", "publish")


def test_last_states_stay_and_show_names_them(finished: tuple[Any, str]) -> None:
    twin, _ = finished
    assert twin.json("show", "small")["states"] == Checkpoints(twin.ledger).live() == [1, 2]
    assert "training states kept after iterations: 1, 2" in twin.rollbook("show", "small")
    assert list((twin.folder / ".rollbook/cache/spool").iterdir()) == []


def test_tags_are_kept_shown_and_removed(desk: Callable[[str], Any], finished: tuple[Any, str]) -> None:
    mine = desk("tagged")
    shutil.copytree(finished[0].folder / ".rollbook/store", mine.folder / ".rollbook/store")
    assert "the state after iteration 1 of small; it stays" in mine.rollbook("tag", "small", "best", "--iteration", "1")
    assert "no longer kept" in mine.rollbook("tag", "small", "early", "--iteration", "0")
    assert mine.json("show", "small")["tags"] == {"best": 1, "early": 0}
    assert "early is no tag of small any more" in mine.rollbook("tag", "small", "early", "--remove")
    assert mine.json("show", "small")["tags"] == {"best": 1}
    refused = mine.rollbook("tag", "small", "best", "--iteration", "2", code=1)
    assert "names iteration 1" in refused and "--remove" in refused
    assert "iteration 7" in mine.rollbook("tag", "small", "x", "--iteration", "7", code=1)
    assert "either --iteration K" in mine.rollbook("tag", "small", "x", code=1)


@pytest.mark.slow
def test_states_that_are_gone_are_made_again(desk: Callable[[str], Any], finished: tuple[Any, str]) -> None:
    """Without any state, iteration 2 starts from train steps 0 and 1, repeated, and gives what the twin has."""
    twin, _ = finished
    mine = desk("rebuilt")
    shutil.copytree(twin.folder / ".rollbook/store", mine.folder / ".rollbook/store")
    for gone in ("checkpoints", "000002", "000003"):
        shutil.rmtree(mine.folder / ".rollbook/store/small" / gone)
    mine.run()
    assert mine.manifest(2, "replay").execution["state_rebuilt"] == [0, 1]
    for step in STEPS:
        assert mine.manifest(2, step).content_digest == twin.manifest(2, step).content_digest, step


@pytest.mark.slow
def test_states_are_written_every_so_many_iterations(desk: Callable[[str], Any], finished: tuple[Any, str]) -> None:
    """Every 2 of 3: after the second, and the last, since a run's last always is; results as ever.

    Before that a limit stops the run: the first update is at ratio 1, the second of an iteration is not.
    """
    twin, _ = finished
    mine = desk("every-two")
    stopped = mine.run("train.max_ratio=1.000001", code=1)
    assert "error: iteration 0, optimizer step 1: ratios from" in stopped and "the worst " in stopped
    worst = stopped.split("the worst ")[1].split(",")[0]
    assert mine.json("show", "small", "--trajectory", worst)["trajectory_id"] == worst
    assert mine.ledger.find(mine.ledger.at(0, "train")) is None
    mine.run("checkpoint.every=2", "checkpoint.keep_last=5")
    assert Checkpoints(mine.ledger).live() == [1, 2]
    assert mine.manifest(2, "train").content_digest == twin.manifest(2, "train").content_digest
