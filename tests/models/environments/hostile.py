"""Environments that do what their prompt tells them to do wrong, and write down when they are made and closed.

A user's file, as `path:Class`: it is loaded where an environment lives.
"""

import math
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from models.environments.contract import Environment, Episode, Message, Reply, ToolCall

GO_ON = {"role": "user", "content": "go on"}
JUNK: dict[str, Any] = {
    "no reply": "hello",
    "nothing": None,
    "no message": Reply(),
    "no content": Reply(({"role": "user"},)),
    "one message": Reply(GO_ON),  # type: ignore[arg-type]
    "messages are none": Reply(None),  # type: ignore[arg-type]
    "not JSON": Reply(({**GO_ON, "shape": object()},)),
    "half a pair": Reply(({"role": "user", "content": "\ud800"},)),
    "nan": Reply((GO_ON,), reward=math.nan),
    "too large": Reply((GO_ON,), reward=1e300),
    "text for a reward": Reply((GO_ON,), reward="1"),  # type: ignore[arg-type]
    "no tool call": Reply((GO_ON,), tool_calls=("add",)),  # type: ignore[arg-type]
    "odd arguments": Reply((GO_ON,), tool_calls=(ToolCall("add", {1, 2}),)),  # type: ignore[arg-type]
}


class Odd(Exception):
    """Cannot be pickled, nor written as UTF-8, nor read by people."""

    def __init__(self) -> None:
        super().__init__("\ud800" * 10_000)
        self.lock = SimpleNamespace(made=lambda: None)


class Hostile(Environment):
    """Three turns, then done; metadata.acts has what happens at `make`, `reset`, `step 1`, ... and `close`."""

    resumable = True

    def __init__(self, log: str, at_make: str = "", **acts: str) -> None:
        """at_make, acts: of every trajectory."""
        self._log, self._turn, self._acts = Path(log), 0, acts
        self._do(at_make)
        self._note("made")

    def reset(self, episode: Episode) -> list[Message]:
        self._acts = {**self._acts, **dict(episode.metadata.get("acts") or {})}  # type: ignore[arg-type]
        self._do(self._acts.get("reset"))
        return list(episode.messages)

    def step(self, said: str) -> Reply:
        self._turn += 1
        act = self._acts.get(f"step {self._turn}")
        if act in JUNK:
            return JUNK[act]
        if act == "call":
            call = ToolCall("add", {"a": 20, "b": 26})
            return Reply(({"role": "tool", "content": "46"},), reward=0.5, tool_calls=(call,))
        self._do(act)
        if self._turn == 3 or act == "done":
            return Reply(done=True, reward=1.0)
        return Reply(({"role": "user", "content": f"turn {self._turn}"},), reward=0.25)

    def close(self) -> None:
        self._note("closed")
        self._do(self._acts.get("close"))

    def _note(self, what: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{what} {os.getpid()}\n")

    def _do(self, act: Any) -> None:
        match act:
            case "raise":
                raise ValueError("fell over")
            case "raise until let go" if not self._log.with_name("let go").exists():
                raise ValueError("not yet")
            case "odd":
                raise Odd
            case "TimeoutError" | "KeyboardInterrupt" | "SystemExit" | "GeneratorExit" | "EOFError":
                raise {e.__name__: e for e in (TimeoutError, KeyboardInterrupt, SystemExit, GeneratorExit, EOFError)}[
                    act
                ]("mine")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "wait for 200":
                while self._log.read_text().count("made") < 200:
                    time.sleep(0.05)
            case "hang":
                self._hang()
            case "hang with a child":
                child = subprocess.Popen(["sleep", "1000"])
                self._log.with_name("children").write_text(f"{os.getpid()} {child.pid}")
                self._hang()

    def _hang(self) -> None:
        """Until the test lets it go."""
        while not self._log.with_name("let go").exists():
            time.sleep(0.01)


class Isolated(Hostile):
    isolate = True


class Begun(Hostile):
    """Cannot be gone on with."""

    resumable = False
