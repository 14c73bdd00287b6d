"""An environment in a process of its own, which ends with its caller and is killed when it takes too long."""

import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from models.environments.contract import Environment, Episode, Opening, Reply, opened, reason, stepped
from models.environments.spec import EnvironmentSpec

START_S = 60.0  # beyond the time limit: to load what an environment needs is no fault of it
END_S = 5.0  # to close
_processes = threading.Lock()  # multiprocessing reads an exit code once: of two threads that ask, one gets another


class EnvironmentLost(RuntimeError):
    """A process that died, hung, or whose environment raised; with the reason."""


@dataclass
class _Child:
    process: BaseProcess
    pipe: Connection

    def exit_code(self) -> int | None:
        """None: it has not ended within END_S."""
        wait([self.process.sentinel], END_S)
        with _processes:
            return self.process.exitcode

    def kill(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        wait([self.process.sentinel])
        with _processes:
            self.process.join()
        self.pipe.close()


class Processes:
    """Forked from a small server process that has loaded the environment's module once; each free for another one."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._idle: list[_Child] = []

    def take(self) -> _Child:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return _start(self._spec)

    def give_back(self, child: _Child) -> None:
        self._idle.append(child)

    def close(self) -> None:
        """Ends those that are idle."""
        while self._idle:
            self._idle.pop().kill()


class Apart:
    """A World (worlds.py)."""

    def __init__(self, processes: Processes, timeout_s: float) -> None:
        self._processes, self._timeout_s = processes, timeout_s
        self._child: _Child | None = None

    def reset(self, episode: Episode) -> Opening:
        self._child = self._processes.take()
        return self._ask(episode, self._timeout_s + START_S)

    def step(self, said: str) -> Reply:
        return self._ask(said, self._timeout_s)

    def close(self) -> None:
        """The environment closes itself, and its process is idle; of one that cannot it is ended.

        Raises EnvironmentLost if it could not close.
        """
        if self._child is None:
            return
        try:
            self._ask(None, END_S)
            self._processes.give_back(self._child)
            self._child = None
        finally:
            self._drop()

    def _ask(self, asked: Episode | str | None, limit_s: float) -> Any:
        child = self._child
        if child is None:
            raise EnvironmentLost("its process is gone")
        try:
            child.pipe.send(asked)
            if not child.pipe.poll(limit_s):
                self._drop()
                own = END_S if asked is None else self._timeout_s
                raise EnvironmentLost(f"no answer within {own:g} s; its process was ended")
            fine, value = child.pipe.recv()
        except (EOFError, OSError):
            code = child.exit_code()
            self._drop()
            raise EnvironmentLost(f"its process died (exit code {code})") from None
        if not fine:
            raise EnvironmentLost(value)
        return value

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def _start(spec: EnvironmentSpec) -> _Child:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *spec.modules])
    ours, theirs = context.Pipe()
    with _processes, _without_main():
        process = context.Process(target=_serve, args=(theirs, spec), daemon=True)
        process.start()
    theirs.close()
    return _Child(process, ours)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A child would run the caller's main module again, which here is Ray's worker: a second each, for nothing."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(pipe: Connection, spec: EnvironmentSpec) -> None:
    """In the child, for one environment after the other, until its caller is gone."""
    os.setsid()
    _end_with_caller()
    made: list[Environment] = []

    def answer(asked: Episode | str | None) -> Opening | Reply | None:
        if asked is None:
            return made.pop().close() if made else None
        if isinstance(asked, str):
            return stepped(made[0], asked)
        made.append(spec.make())
        return opened(made[0], asked)

    with contextlib.suppress(EOFError, OSError):  # the caller is gone
        while True:
            asked = pipe.recv()
            try:
                told = (True, answer(asked))
            except BaseException as error:  # whatever a user's class raises fails its trajectory, never the run
                told = (False, reason(error))
            pipe.send(told)


def _end_with_caller() -> None:
    """The kernel kills this process, and what it starts, at the caller's end, whatever hangs in them by then.

    Their parent is the fork server, which lives as long as they do; but the caller alone holds the other end of a pipe.
    """
    caller = multiprocessing.parent_process()
    assert caller is not None
    fcntl.fcntl(caller.sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(caller.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(caller.sentinel, fcntl.F_SETFL, os.O_ASYNC)
