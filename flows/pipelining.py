"""Pipelined runs: the next iteration's rollouts are made while this one trains, by the policy that it began with."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from tasks.step import Run


@contextlib.contextmanager
def meanwhile(run: Run, iteration: int, call: Callable[[], object] | None) -> Iterator[None]:
    """`call` runs beside the block, and has ended with it; whatever it raised is raised then.

    How long the iteration waited for it is kept for its summary. After an error of the block it is not waited for: the
    end of its resident ends it.
    """
    if call is None:
        yield
        return
    pool = ThreadPoolExecutor(1, "ahead")
    try:
        ahead = pool.submit(copy_context().run, call)
        yield
        started = time.perf_counter()
        ahead.result()
        run.waited_s[iteration] = time.perf_counter() - started
    finally:
        pool.shutdown(wait=False)
