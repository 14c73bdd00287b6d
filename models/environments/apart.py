"""An environment in a process of its own, which ends with its caller and is killed when it takes too long."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from models.environments.contract import Environment, Episode, Opening, Reply, opened, reason, stepped
from models.environments.spec import EnvironmentSpec

START_S = 60.0  # beyond the time limit: to load what an environment needs is no fault of it
END_S = 5.0  # to close
PR_SET_PDEATHSIG = 1


class EnvironmentLost(RuntimeError):
    """A process that died, hung, or whose environment raised; with the reason."""


@dataclass
class _Child:
    process: BaseProcess
    pipe: Connection

    def kill(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Apart:
    """A World (worlds.py). Forked from a small server process that has loaded the environment's module once."""

    def __init__(self, spec: EnvironmentSpec, timeout_s: float) -> None:
        self._spec, self._timeout_s = spec, timeout_s
        self._child: _Child | None = None

    def reset(self, episode: Episode) -> Opening:
        self._child = _start(self._spec)
        return self._ask(episode, self._timeout_s + START_S)

    def step(self, said: str) -> Reply:
        return self._ask(said, self._timeout_s)

    def close(self) -> None:
        """The environment closes itself, if it can; its process is gone afterwards in any case."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError, EOFError):
            child.pipe.send(None)
            child.process.join(END_S)
        child.kill()

    def _ask(self, asked: Episode | str, limit_s: float) -> Any:
        child = self._child
        if child is None:
            raise EnvironmentLost("its process is gone")
        try:
            child.pipe.send(asked)
            if not child.pipe.poll(limit_s):
                self._drop()
                raise EnvironmentLost(f"no answer within {self._timeout_s:g} s; its process was ended")
            fine, value = child.pipe.recv()
        except (EOFError, OSError):
            child.process.join(END_S)
            code = child.process.exitcode
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
    context.set_forkserver_preload(["__main__", *spec.modules])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, spec), daemon=True)
    process.start()
    theirs.close()
    return _Child(process, ours)


def _serve(pipe: Connection, spec: EnvironmentSpec) -> None:
    """In the child, until it is told to close or its caller is gone."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its parent, the fork server, ends with our caller
    environment: Environment | None = None
    try:
        while (asked := _heard(pipe)) is not None:
            try:
                if isinstance(asked, Episode):
                    environment = spec.make()
                    pipe.send((True, opened(environment, asked)))
                elif environment is not None:
                    pipe.send((True, stepped(environment, asked)))
            except Exception as error:  # whatever a user's class raises fails its trajectory, never the run
                pipe.send((False, reason(error)))
    finally:
        if environment is not None:
            environment.close()


def _heard(pipe: Connection) -> Episode | str | None:
    """An episode to open, what the policy said, or None: the end."""
    with contextlib.suppress(EOFError, OSError):
        return pipe.recv()
    return None
