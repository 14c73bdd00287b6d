"""Calls with a time limit, in real processes."""

import functools
import os
import re
import time
from collections.abc import Iterator

import pytest

from infra.timed_pool import TimedPool

nothing = functools.partial(int, 0)


@pytest.fixture(scope="module")
def pool() -> Iterator[TimedPool]:
    made = TimedPool(2)
    yield made
    made.close()


def act(what: str) -> object:
    if what == "raise":
        raise KeyError("lost")
    if what == "sleep":
        time.sleep(60)
    if what == "swallow":  # a user's broad except must not save a call whose time is up
        try:
            time.sleep(60)
        except Exception:
            return "went on"
    if what == "regex":  # catastrophic backtracking
        re.match(r"(a+)+$", "a" * 40 + "b")
    if what == "die":
        os._exit(4)
    return what


def load_slowly() -> None:
    time.sleep(1.0)


def test_outcomes_in_order(pool: TimedPool) -> None:
    rows = [(w,) for w in ("x", "raise", "sleep", "swallow", "regex", "die", "y")]
    outcomes = pool.map(act, rows, 0.5, 1, nothing)
    assert [o.value for o in outcomes] == ["x", None, None, None, None, None, "y"]
    assert outcomes[1].error == "KeyError: 'lost'"
    assert {o.error for o in outcomes[2:5]} == {"no answer within 0.5 s"}
    assert outcomes[5].error == "its process died (exit code 4)"
    assert {o.attempts for o in outcomes} == {1}


def test_preparation_is_off_the_clock(pool: TimedPool) -> None:
    assert pool.map(act, [("x",)], 0.3, 1, load_slowly)[0].value == "x"


def test_preparation_that_fails_fails_the_row(pool: TimedPool) -> None:
    outcome = pool.map(act, [("x",)], 1.0, 2, functools.partial(act, "raise"))[0]
    assert outcome.error == "KeyError: 'lost'" and outcome.attempts == 2


def test_no_rows(pool: TimedPool) -> None:
    assert pool.map(act, [], 1.0, 1, nothing) == []
