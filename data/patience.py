"""Waiting for a place that does not answer for a while: its requests are tried again, up to a limit that is told."""

import logging
import threading
import time
from collections.abc import Callable

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

log = logging.getLogger("rollbook")
PATIENCE_S = 120.0
LONGEST_PAUSE_S = 3.0
CLEANING_S = 10.0  # after giving up: what comes later is a new attempt, with patience of its own


class Patience:
    """Calls again what failed for a reason that passes, until `seconds` after the place stopped answering.

    The limit is of the outage, not of a call: many threads, and what is cleaned up after one gave up, share it.
    `passing` tells whether an error may pass, `reason` says it in few words.
    """

    def __init__(
        self,
        place: str,
        seconds: float,
        passing: Callable[[BaseException], bool],
        reason: Callable[[BaseException], str],
    ) -> None:
        self._place, self._seconds, self._passing, self._reason = place, seconds, passing, reason
        self._began: float | None = None  # of the outage, monotonic seconds
        self._gave_up = 0.0  # monotonic seconds
        self._lock = threading.Lock()
        self._retrying = Retrying(
            retry=retry_if_exception(passing),
            wait=wait_random_exponential(multiplier=0.2, max=LONGEST_PAUSE_S),
            stop=self._over,
            reraise=True,
        )

    def __call__[T](self, call: Callable[[], T]) -> T:
        """What `call` returns, or raises once it is not worth waiting, or no longer."""
        with self._lock:
            if self._gave_up and time.monotonic() - self._gave_up > CLEANING_S:
                self._began, self._gave_up = None, 0.0
        try:
            result = self._retrying.copy()(call)
        except Exception as error:
            if not self._passing(error):  # a refusal is an answer too
                self._answered()
            raise
        self._answered()
        return result

    def _answered(self) -> None:
        with self._lock:
            if self._began is not None and self._seconds:
                log.warning("store %s answers again after %.0f s", self._place, time.monotonic() - self._began)
            self._began, self._gave_up = None, 0.0

    def _over(self, state: RetryCallState) -> bool:
        """After a failed try: whether it was the last. The first one of an outage is told."""
        error = state.outcome.exception() if state.outcome else None
        now = time.monotonic()
        with self._lock:
            if self._began is None:
                self._began = now
                if self._seconds and error is not None:
                    told = (self._place, self._reason(error), self._seconds)
                    log.warning("store %s: %s; trying for another %.0f s", *told)
            if now - self._began < self._seconds:
                return False
            self._gave_up = now
            return True
