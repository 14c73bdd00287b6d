"""Calls that may raise, hang or die, made in child processes that can be killed. Built on pebble."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

# Beyond the time limit: for a child to start and load its libraries, which is no fault of the call.
GRACE_S = 60.0


class CallTimeout(BaseException):
    """Raised inside a call that takes too long; not an Exception, so that `except Exception` does not swallow it."""


@dataclass(frozen=True)
class Outcome:
    """What came of one row: a value, or why there is none."""

    value: Any
    error: str | None
    attempts: int


class TimedPool:
    """Runs a module-level function over rows, each call with its own time limit. Made once and kept warm."""

    def __init__(self, workers: int) -> None:
        # Not fork: the parent holds Ray's threads.
        self._pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"))
        self._pool.schedule(str)  # starts the children now

    def map(
        self,
        function: Callable[..., Any],
        rows: Sequence[tuple[Any, ...]],
        timeout_s: float,
        attempts: int,
        prepare: Callable[[], object],
    ) -> list[Outcome]:
        """`function(*row)` for every row, in order; a row that fails is tried `attempts` times in all.

        `prepare()` runs before each call, off its clock: load there what the call needs. A call that passes `timeout_s`
        is interrupted, and killed with its process if that does not help. Nothing that a row does is raised here.
        """
        outcomes: list[Outcome | None] = [None] * len(rows)
        waiting = list(range(len(rows)))
        for attempt in range(1, attempts + 1):
            limit = timeout_s + GRACE_S
            calls = {
                i: self._pool.schedule(_timed, args=(prepare, function, rows[i], timeout_s), timeout=limit)
                for i in waiting
            }
            for i, call in calls.items():
                outcomes[i] = _outcome(call, timeout_s, attempt)
            waiting = [i for i in waiting if (o := outcomes[i]) is not None and o.error is not None]
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


def _timed(prepare: Callable[[], object], function: Callable[..., Any], row: tuple[Any, ...], timeout_s: float) -> Any:
    """In the child: the call, interrupted by an alarm when its time is up."""
    prepare()
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        return function(*row)
    except CallTimeout:
        raise TimeoutError from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(signum: int, frame: object) -> None:
    raise CallTimeout


def _outcome(call: ProcessFuture, timeout_s: float, attempt: int) -> Outcome:
    try:
        return Outcome(call.result(), None, attempt)
    except TimeoutError:
        return Outcome(None, f"no answer within {timeout_s} s", attempt)
    except ProcessExpired as error:
        return Outcome(None, f"its process died (exit code {error.exitcode})", attempt)
    except Exception as error:  # whatever a user's function raises is a failed row, never a failed run
        return Outcome(None, "".join(traceback.format_exception_only(error)).strip(), attempt)
