"""Calls that may raise, hang or die, made in child processes that can be killed. Built on pebble."""

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool


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

    def map(
        self, function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], timeout_s: float, attempts: int
    ) -> list[Outcome]:
        """`function(*row)` for every row, in order; a row that fails is tried `attempts` times in all.

        A call that passes `timeout_s` is killed with its process. Nothing that a row does is raised here.
        """
        outcomes: list[Outcome | None] = [None] * len(rows)
        waiting = list(range(len(rows)))
        for attempt in range(1, attempts + 1):
            calls = {i: self._pool.schedule(function, args=rows[i], timeout=timeout_s) for i in waiting}
            for i, call in calls.items():
                outcomes[i] = _outcome(call, timeout_s, attempt)
            waiting = [i for i in waiting if (o := outcomes[i]) is not None and o.error is not None]
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


def _outcome(call: ProcessFuture, timeout_s: float, attempt: int) -> Outcome:
    try:
        return Outcome(call.result(), None, attempt)
    except TimeoutError:
        return Outcome(None, f"no answer within {timeout_s} s", attempt)
    except ProcessExpired as error:
        return Outcome(None, f"its process died (exit code {error.exitcode})", attempt)
    except Exception as error:  # whatever a user's function raises is a failed row, never a failed run
        return Outcome(None, "".join(traceback.format_exception_only(error)).strip(), attempt)
