"""The environments of one generate call: made, called side by side with a time limit, and closed exactly once each."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from models.environments.apart import Apart, EnvironmentLost, keep, processes_of
from models.environments.contract import Environment, Episode, Opening, Reply, opened, reason, stepped
from models.environments.spec import EnvironmentSpec

AT_ONCE = 64  # threads that take calls
SLOW_S = 1.0  # threads that are all longer at one call wait for something, or hang: as many others come
LOOK_S = 0.002
log = logging.getLogger("rollbook")


@dataclass(frozen=True)
class Fault:
    """An environment that raised, hung, died or said what is no reply: its trajectory has failed."""

    error: str


class World(Protocol):
    """One trajectory's environment, wherever it lives. Its calls never overlap; `close` may come while one hangs."""

    def reset(self, episode: Episode) -> Opening: ...

    def step(self, said: str) -> Reply: ...

    def close(self) -> None: ...


class Here:
    """An environment in this process. A call that hangs can only be given up: its environment is closed after it."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Environment | None = None
        self._state = threading.Lock()
        self._busy = self._closed = False

    def reset(self, episode: Episode) -> Opening:
        return self._call(lambda: opened(self._made(), episode))

    def step(self, said: str) -> Reply:
        return self._call(lambda: stepped(self._made(), said))

    def close(self) -> None:
        with self._state:
            over, self._closed = self._closed or self._busy, True
        if not over:
            self._end()

    def _call[T](self, call: Callable[[], T]) -> T:
        with self._state:
            if self._closed:
                raise RuntimeError("the environment is closed")
            self._busy = True
        try:
            return call()
        finally:
            with self._state:
                self._busy, closed = False, self._closed
            if closed:  # it was given up
                _tell(_outcome_of(self._end))

    def _made(self) -> Environment:
        self._environment = self._environment or self._make()
        return self._environment

    def _end(self) -> None:
        if self._environment is not None:
            self._environment.close()


class Worlds(Protocol):
    """What answers the policy, by trajectory. Leaving the context closes all that are open."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def reset(self, episodes: Sequence[Episode]) -> list[Opening | Fault]:
        """Makes an environment for each, and opens it."""
        ...

    def step(self, said: Sequence[tuple[str, str]]) -> list[Reply | Fault]:
        """said: trajectory, and the text of its turn."""
        ...

    def close(self, trajectories: Sequence[str]) -> None: ...


class Unanswered:
    """Nothing answers: the first turn is the last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def reset(self, episodes: Sequence[Episode]) -> list[Opening | Fault]:
        return [Opening(episode.messages, ()) for episode in episodes]

    def step(self, said: Sequence[tuple[str, str]]) -> list[Reply | Fault]:
        return [Reply(done=True) for _ in said]

    def close(self, trajectories: Sequence[str]) -> None: ...


class Environments:
    """An environment for each trajectory."""

    def __init__(self, spec: EnvironmentSpec, timeout_s: float) -> None:
        """timeout_s: what an environment may take for a turn. Raises UserCodeError for a file that cannot be run."""
        self._spec, self._timeout_s = spec, timeout_s
        # A process keeps the time itself, and knows how long it takes to start.
        self._limit_s = None if spec.isolate else timeout_s
        self._processes = processes_of(spec)
        self._open: dict[str, World] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(list(self._open))
        keep(self._processes)

    def reset(self, episodes: Sequence[Episode]) -> list[Opening | Fault]:
        self._open |= {episode.trajectory_id: self._made() for episode in episodes}
        outcomes = self._each([partial(self._open[episode.trajectory_id].reset, episode) for episode in episodes])
        if self._spec.announce:
            return outcomes
        return [Opening(o.messages, ()) if isinstance(o, Opening) else o for o in outcomes]

    def step(self, said: Sequence[tuple[str, str]]) -> list[Reply | Fault]:
        return self._each([partial(self._open[trajectory].step, text) for trajectory, text in said])

    def close(self, trajectories: Sequence[str]) -> None:
        """An environment that cannot close is told of, and forgotten."""
        worlds = [self._open.pop(trajectory) for trajectory in trajectories]
        for outcome in self._each([world.close for world in worlds]):
            _tell(outcome)

    def _made(self) -> World:
        return Apart(self._processes, self._timeout_s) if self._spec.isolate else Here(self._spec.make)

    def _each[T](self, calls: Sequence[Callable[[], T]]) -> list[T | Fault]:
        """What came of every call, in order."""
        calling = _Calling(calls)
        calling.begin_all()
        return [self._outcome(future, since) for future, since in zip(calling.futures, calling.since, strict=True)]

    def _outcome[T](self, future: "Future[T | Fault]", since: float) -> T | Fault:
        left = None if self._limit_s is None else max(0.0, since + self._limit_s - time.monotonic())
        if wait([future], left).done:
            return future.result()
        return Fault(f"no answer within {self._timeout_s:g} s; a class with isolate = True would be ended")


class _Calling[T]:
    """Calls side by side, in threads that take one after the other, since to start a thread takes longer than most."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self.futures: list[Future[T | Fault]] = [Future() for _ in calls]
        self.since = [0.0] * len(calls)  # when each began, by the monotonic clock
        self._waiting = deque(enumerate(calls))
        self._begun = threading.Lock()  # held while one is taken and its time noted

    def begin_all(self) -> None:
        """Returns when each has begun. Threads that hang keep no call from its turn: others come to their help."""
        while self._waiting:
            for _ in range(AT_ONCE):
                if self._waiting:
                    threading.Thread(target=self._work, daemon=True).start()
            self._watch()
        with self._begun:  # the last one's time too
            return

    def _watch(self) -> None:
        """Until none waits, or none was begun for SLOW_S."""
        left, since = len(self._waiting), time.monotonic()
        while self._waiting and time.monotonic() < since + SLOW_S:
            time.sleep(LOOK_S)
            if len(self._waiting) < left:
                left, since = len(self._waiting), time.monotonic()

    def _work(self) -> None:
        with contextlib.suppress(IndexError):  # none is left
            while True:
                at, call = self._begin_one()
                self.futures[at].set_result(_outcome_of(call))

    def _begin_one(self) -> tuple[int, Callable[[], T]]:
        with self._begun:
            at, call = self._waiting.popleft()
            self.since[at] = time.monotonic()
        return at, call


def _outcome_of[T](call: Callable[[], T]) -> T | Fault:
    try:
        return call()
    except EnvironmentLost as lost:
        return Fault(str(lost))
    except BaseException as error:  # whatever a user's class raises fails its trajectory, never the run
        return Fault(reason(error))


def _tell(closed: object) -> None:
    if isinstance(closed, Fault):
        log.warning("an environment did not close: %s", closed.error)
