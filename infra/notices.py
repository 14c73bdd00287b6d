"""What a resident warns of, on the driver's log: Ray keeps what its workers print to itself."""

import contextlib
import logging
import time
from concurrent.futures import Future

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

log = logging.getLogger("rollbook")
NAME = "rollbook-notices"  # of the actor that holds them, one a driver, made when there is a first one
PAUSE_S = 1.0


class Notices:
    """Lines on their way."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        self._lines.append(line)

    def take(self) -> list[str]:
        taken, self._lines = self._lines, []
        return taken


class ToDriver(logging.Handler):
    """In a resident."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[ActorHandle] = []  # Ray ends an actor whose maker lets go of it

    def emit(self, record: logging.LogRecord) -> None:
        made = ray.remote(num_cpus=0)(Notices).options(name=NAME, get_if_exists=True).remote()
        made.add.remote(record.getMessage())
        self._kept.append(made)


class Listener:
    """In the driver: asks for new lines now and then while it waits for residents, and never waits for the answer."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._asked: Future[list[str]] | None = None

    def listen(self) -> None:
        if self._asked is not None and self._asked.done():
            with contextlib.suppress(RayError):  # the resident that held the actor ended
                for line in self._asked.result():
                    log.warning(line)
            self._asked = None
        if self._asked is None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PAUSE_S
            with contextlib.suppress(ValueError):  # nothing to tell so far
                self._asked = ray.get_actor(NAME).take.remote().future()
