"""Weights handed over in memory: the next rollouts begin while the policy is recorded, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from data.ledger import STEPS
from tests.flows.chaos import Running, require_equal

ITERATIONS = 3  # of the small run


def test_it_is_the_run_that_it_would_be(desk: Callable[..., Any], finished: tuple[Any, str]) -> None:
    twin, mine = finished[0], desk("handed")
    mine.run("engine.sync=tensor")
    for k in range(ITERATIONS):
        for step in STEPS:
            made, theirs = mine.manifest(k, step), twin.manifest(k, step)
            assert (made.key, made.content_digest) == (theirs.key, theirs.content_digest), (k, step)
        assert mine.manifest(k, "publish").files
    shown = [iteration["metrics"] for iteration in mine.json("show", "small")["iterations"]]
    assert ["seconds/handing" in metrics for metrics in shown] == [True, True, False]  # none comes after the last
    for k in range(1, ITERATIONS):
        assert mine.manifest(k, "generate").created_at > mine.manifest(k - 1, "publish").created_at


@pytest.mark.slow
def test_c21_killed_between_the_two_it_ends_alike(desk: Callable[..., Any], finished: tuple[Any, str]) -> None:
    """The driver when a policy is about to be recorded, then the trainer when the next rollouts are."""
    mine = desk("handed-killed")
    with Running(mine, mine.small("engine.sync=tensor")) as running:
        running.until(running.manifest(0, "train").exists)
        family = running.family()
        running.driver.kill()
        running.driver.wait()
        psutil.wait_procs(family, timeout=60)
        running._start()
        running.until(running.manifest(1, "train").exists)
        running.part("trainer 0").kill()
        running.finish()
    require_equal(mine.ledger, finished[0].ledger, ITERATIONS)
