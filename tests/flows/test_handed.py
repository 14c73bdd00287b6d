"""Weights handed over in memory: the next rollouts begin while the policy is recorded, and nothing else changes."""

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from data.ledger import STEPS, Ledger
from data.store import Store
from data.summary import summarize_iteration
from tests.flows.chaos import Running, require_equal

ITERATIONS = 3  # of the small run


def test_it_is_the_run_that_it_would_be(home: Path, rollbook: Callable[..., str], finished: tuple[Any, str]) -> None:
    rollbook(*finished[0].small("run=handed", "engine.sync=tensor"))
    mine, twin = (Ledger(Store(f"file://{home}/store"), name) for name in ("handed", "small"))
    require_equal(mine, twin, ITERATIONS)
    made = [{step: mine.find(mine.at(k, step)) for step in STEPS} for k in range(ITERATIONS)]
    assert all(iteration["publish"].files for iteration in made)
    for before, after in pairwise(made):
        assert after["generate"].created_at > before["publish"].created_at
    shown = [iteration["metrics"] for iteration in json.loads(rollbook("show", "handed", "--json"))["iterations"]]
    assert ["seconds/handing" in metrics for metrics in shown] == [True, True, False]  # none comes after the last
    assert " hand " not in finished[1]  # by the store nothing is handed over
    assert not any("seconds/handing" in found.metrics for found in map(partial(summarize_iteration, twin), range(3)))


@pytest.mark.slow
def test_c21_killed_between_the_two_it_ends_alike(desk: Callable[..., Any], finished: tuple[Any, str]) -> None:
    """The driver when a policy is about to be recorded, then the trainer when the next rollouts are."""
    mine = desk("handed-killed")
    with Running(mine, mine.small("engine.sync=tensor")) as running:
        running.until(running.manifest(0, "train").exists)
        running.restart()
        running.until(running.manifest(1, "train").exists)
        running.part("trainer 0").kill()
        running.finish()
    require_equal(mine.ledger, finished[0].ledger, ITERATIONS)
