"""C34: an environment is closed exactly once, whatever it does; and what it does wrong fails its trajectory alone."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.user_code import load
from models.environments.contract import Episode, Opening, Reply
from models.environments.spec import EnvironmentSpec
from models.environments.worlds import Environments, Fault

HOSTILE = Path(__file__).with_name("hostile.py")
KINDS = ["Hostile", "Isolated"]
LIMIT_S = 20.0  # far more than anything takes that does not hang


class Log:
    """What the environments of a test have written down."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"

    def count(self, what: str) -> int:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return sum(line.startswith(what) for line in lines)

    @property
    def sessions(self) -> tuple[int, int]:
        """(made, closed)"""
        return self.count("made"), self.count("closed")

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.path.read_text().splitlines()]


def spec_of(kind: str, log: Log, **options: str) -> EnvironmentSpec:
    return EnvironmentSpec(load(f"{HOSTILE}:{kind}"), (), {"log": str(log.path), **options})


def episode(name: str = "q@0/0", **acts: str) -> Episode:
    told = {"prompt_id": "q", "acts": {key.replace("_", " "): act for key, act in acts.items()}}
    return Episode(name, ({"role": "user", "content": "?"},), told, 7)


def until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def children(log: Log) -> set[int]:
    """An environment that hangs with a child, and that child."""
    return {int(pid) for pid in log.path.with_name("children").read_text().split()}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def played(worlds: Environments, asked: Episode, turns: int = 3) -> Any:
    """The last thing that came of it."""
    [found] = worlds.reset([asked])
    for _ in range(turns):
        if not isinstance(found, Fault):
            [found] = worlds.step([(asked.trajectory_id, "said")])
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("acts", "error"),
    [
        ({}, None),
        ({"reset": "raise"}, "ValueError: fell over"),
        ({"step_2": "raise"}, "ValueError: fell over"),
        ({"step_1": "TimeoutError"}, "TimeoutError: mine"),
        ({"step_1": "KeyboardInterrupt"}, "KeyboardInterrupt: mine"),
        ({"step_1": "SystemExit"}, "SystemExit: mine"),
        ({"step_1": "GeneratorExit"}, "GeneratorExit: mine"),
        ({"step_1": "EOFError"}, "EOFError: mine"),
    ],
    ids=str,
)
def test_c34_closed_once_whatever_it_raises(log: Log, kind: str, acts: dict[str, str], error: str | None) -> None:
    with Environments(spec_of(kind, log), LIMIT_S) as worlds:
        found = played(worlds, episode(**acts))
        assert found == (Reply(done=True, reward=1.0) if error is None else Fault(error))
        worlds.close(["q@0/0"])
        assert log.sessions == (1, 1)
    assert log.sessions == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_c34_one_that_cannot_be_made_is_not_closed(log: Log, kind: str) -> None:
    with Environments(spec_of(kind, log, at_make="raise"), LIMIT_S) as worlds:
        assert played(worlds, episode()) == Fault("ValueError: fell over")
    assert log.sessions == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_c34_an_engine_that_fails_leaves_none_open(log: Log, kind: str) -> None:
    names = [f"q@0/{i}" for i in range(5)]
    with pytest.raises(RuntimeError, match="the engine"), Environments(spec_of(kind, log), LIMIT_S) as worlds:
        worlds.reset([episode(name) for name in names])
        worlds.close(names[:1])
        raise RuntimeError("the engine")
    assert log.sessions == (5, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_c34_one_that_cannot_close_is_told_of_and_the_others_are_closed(
    log: Log, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rollbook"), Environments(spec_of(kind, log), LIMIT_S) as worlds:
        worlds.reset([episode("q@0/0", close="raise"), episode("q@0/1"), episode("q@0/2", close="SystemExit")])
    assert log.sessions == (3, 3)
    assert sorted(caplog.messages) == [
        "an environment did not close: SystemExit: mine",
        "an environment did not close: ValueError: fell over",
    ]


def test_c34_what_hangs_in_a_thread_is_closed_when_its_call_is_over(log: Log) -> None:
    with Environments(spec_of("Hostile", log), 0.2) as worlds:
        assert played(worlds, episode(step_1="hang")) == Fault(
            "no answer within 0.2 s; a class with isolate = True would be ended"
        )
        worlds.close(["q@0/0"])
        assert log.sessions == (1, 0)  # never while a call of it runs
    log.path.with_name("let go").touch()
    until(lambda: log.sessions == (1, 1))


def test_c34_one_that_was_given_up_and_cannot_close_is_told_of(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rollbook"), Environments(spec_of("Hostile", log), 0.2) as worlds:
        played(worlds, episode(step_1="hang", close="raise"))
    log.path.with_name("let go").touch()
    until(lambda: caplog.messages)
    assert caplog.messages == ["an environment did not close: ValueError: fell over"]


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("hang", "no answer within 2 s; its process was ended"),
        ("exit", "its process died (exit code 3)"),
        ("kill", "its process died (exit code -9)"),
    ],
)
def test_c34_a_process_that_hangs_or_dies_is_gone(log: Log, act: str, error: str) -> None:
    with Environments(spec_of("Isolated", log), 2.0) as worlds:
        assert played(worlds, episode(step_2=act)) == Fault(error)
        assert all(gone(pid) for pid in log.pids())
    assert log.sessions == (1, 0)  # it had no chance


def test_c34_a_process_that_dies_between_turns_is_told_of(log: Log) -> None:
    with Environments(spec_of("Isolated", log), LIMIT_S) as worlds:
        assert played(worlds, episode(), 1) == Reply(({"role": "user", "content": "turn 1"},), reward=0.25)
        os.kill(log.pids()[0], signal.SIGKILL)
        assert worlds.step([("q@0/0", "said")]) == [Fault("its process died (exit code -9)")]


@pytest.mark.parametrize("act", ["hang", "exit"])
def test_c34_a_process_that_cannot_close_is_gone(
    log: Log, act: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.environments.apart.END_S", 1.0)
    with caplog.at_level(logging.WARNING, "rollbook"), Environments(spec_of("Isolated", log), LIMIT_S) as worlds:
        worlds.reset([episode(close=act)])
    assert all(gone(pid) for pid in log.pids())
    assert caplog.messages == [
        "an environment did not close: "
        + {"hang": "no answer within 1 s; its process was ended", "exit": "its process died (exit code 3)"}[act]
    ]


CALLER = """
import sys
from models.environments.worlds import Environments
from tests.models.environments.test_worlds import Log, episode, spec_of
from pathlib import Path
log = Log(Path(sys.argv[1]))
worlds = Environments(spec_of("Isolated", log), 600.0)
worlds.reset([episode("q@0/0", step_1="hang with a child"), episode("q@0/1")])
print("ready", flush=True)
worlds.step([("q@0/0", "said")])
"""


def test_c34_no_process_outlives_a_caller_that_was_killed(log: Log) -> None:
    """One of its two environments is in the middle of a user's code, the other waits to be asked."""
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(log.path.parent)], stdout=subprocess.PIPE)
    assert caller.stdout is not None and caller.stdout.readline() == b"ready\n"
    until(lambda: log.path.with_name("children").exists() and len(children(log)) == 2)  # it hangs by now
    family = psutil.Process(caller.pid).children(recursive=True)
    assert set(log.pids()) <= {process.pid for process in family} and len(log.pids()) == 2
    assert children(log) <= {process.pid for process in family}
    caller.kill()
    caller.wait()
    until(lambda: all(gone(process.pid) for process in family))


def test_c34_what_a_hanging_process_has_started_ends_with_it(log: Log) -> None:
    with Environments(spec_of("Isolated", log), 2.0) as worlds:
        assert isinstance(played(worlds, episode(step_1="hang with a child")), Fault)
    until(lambda: all(gone(pid) for pid in children(log)))


PLAIN = "what JSON cannot hold ("
WRONG = {
    "no reply": "Hostile.step gave an object of type str; it must be a Reply",
    "nothing": "Hostile.step gave None; it must be a Reply",
    "no message": "Hostile.step gave no message and is not done; the policy needs something to answer",
    "no content": "Hostile.step gave the message {'role': 'user'}; a message must be a dict with role and content",
    "one message": "Hostile.step gave an object of type dict for messages; they must be a list of dicts",
    "messages are none": "Hostile.step gave None for messages; they must be a list of dicts with role and content",
    "not JSON": f"Hostile.step gave a message with {PLAIN}TypeError: Object of type object is not JSON serializable)",
    "half a pair": f"Hostile.step gave a message with {PLAIN}UnicodeEncodeError",
    "nan": "Hostile.step gave the reward nan; it must be finite, or None for no reward",
    "too large": "Hostile.step gave the reward 1e+300; it must be finite",
    "text for a reward": "Hostile.step gave an object of type str for the reward; it must be a number",
    "no tool call": "Hostile.step gave an object of type str for a tool call; it must be a ToolCall",
    "odd arguments": f"Hostile.step gave a tool call with {PLAIN}TypeError: Object of type set",
}


def test_what_is_no_reply_says_what_is_wrong(log: Log) -> None:
    with Environments(spec_of("Hostile", log), LIMIT_S) as worlds:
        for i, (junk, error) in enumerate(WRONG.items()):
            found = played(worlds, episode(f"q@0/{i}", step_1=junk))
            assert isinstance(found, Fault) and found.error.startswith(f"TypeError: {error}"), (junk, found)
    assert log.sessions == (len(WRONG), len(WRONG))


def test_what_cannot_be_pickled_comes_back_from_a_process_as_plain_words(log: Log) -> None:
    """An exception with half of a surrogate pair ten thousand times; an object that only its own process knows."""
    with Environments(spec_of("Isolated", log), LIMIT_S) as worlds:
        odd = played(worlds, episode("q@0/0", step_1="odd"))
        junk = played(worlds, episode("q@0/1", step_1="odd arguments"))
    assert odd.error.endswith("Odd: " + "?" * (4000 - odd.error.index("?"))) and len(odd.error) == 4000
    assert "what JSON cannot hold" in junk.error
    assert log.sessions == (2, 2)


def test_calls_that_wait_keep_no_other_from_its_turn(log: Log) -> None:
    """Of 200 environments the first 80, more than there are places, wait until the last one is made."""
    names = [f"q@0/{i}" for i in range(200)]
    with Environments(spec_of("Hostile", log), LIMIT_S) as worlds:
        asked = [episode(name, **({"reset": "wait for 200"} if i < 80 else {})) for i, name in enumerate(names)]
        assert all(isinstance(opening, Opening) for opening in worlds.reset(asked))
    assert log.sessions == (200, 200)
