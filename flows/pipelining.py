"""What runs at the same time: the next iteration's rollouts beside this one's last steps, and steps beside steps."""

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


def both[A, B](run: Run, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Two steps that need nothing of each other, at the same time; in a plan or a verification one after the other."""
    if run.planning or run.verification is not None:
        return first(), second()
    pool = ThreadPoolExecutor(1, "beside")
    try:
        beside = pool.submit(copy_context().run, first)
        found = second()
        return beside.result(), found
    finally:
        pool.shutdown(wait=False)
