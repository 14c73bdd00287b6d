"""Kill -9 of one process of a run in the middle of a chosen step, from outside: nothing in the product helps.

Residents are held with SIGSTOP and let go in turn, so that the driver hands the step to a resident that has stopped.
That one is then let go in slices until its title says that it is at work, and further into the step by a seeded share.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from data.ledger import Ledger

STEPS = ("generate", "score", "replay", "advantages", "train", "publish")
RUNS_ON = dict(zip(STEPS, ("engine", "worker", "trainer 0", "worker", "trainer 0", "trainer 0"), strict=True))
VICTIMS = ("driver", "worker", "trainer 0", "engine")
LOOK_S = 0.5
QUIET = 0.2  # of a core, by all processes of a run: whatever can go on has
SLICE_S = 0.001
LONG = ("generate", "train")  # take .1 s and more, and are killed further inside
PATIENCE_S = 240.0
TIMES = {"generate/tokens_per_s", "generate/sync_s", "train/learn_s"}  # the metrics that are seconds


@dataclass(frozen=True)
class Kill:
    victim: str
    step: str
    iteration: int
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of a kill."""

    kill: Kill
    into_s: float  # the resident had been at work on the step for so long
    useful_s: float  # until the next manifest was on record: from the kill, or from the start of the command after it
    gone_s: float | None  # driver only: until none of its processes was left


class Running:
    """A run's driver and the processes below it. At the end of the block all must be gone."""

    def __init__(self, desk: Any, arguments: list[str]) -> None:
        self._desk, self._arguments = desk, arguments
        self._seen: set[psutil.Process] = set()
        run = next(word.removeprefix("run=") for word in reversed(arguments) if word.startswith("run="))
        self.folder: Path = desk.folder / ".rollbook/store" / run
        self._output: Path = desk.folder / "output.txt"
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """After a test that failed, too, nothing goes on."""
        self._process.kill()
        self._process.wait()
        _wait_gone(self._seen)

    def _start(self) -> None:
        with self._output.open("ab") as output:
            self._told = output.tell()
            self._process = subprocess.Popen(
                self._desk.command(*self._arguments), cwd=self._desk.folder, env=self._desk.environment,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.driver = psutil.Process(self._process.pid)

    def finish(self) -> None:
        """Wait for the end; fails unless it is a good one."""
        code = self._process.wait(PATIENCE_S)
        assert code == 0, self.story()

    def story(self) -> str:
        """What this start of the command has printed."""
        return self._output.read_bytes()[self._told :].decode()

    def family(self) -> list[psutil.Process]:
        """All processes below the driver."""
        found = self.driver.children(recursive=True)
        self._seen |= set(found)
        return found

    def part(self, name: str) -> psutil.Process:
        """The process that plays a part, by its title."""
        if name == "driver":
            return self.driver
        return next(p for p in self.family() if _title(p).startswith(f"ray::rollbook {name}"))

    def manifest(self, iteration: int, step: str) -> Path:
        return self.folder / f"{iteration:06d}/{step}/manifest.json"

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self._process.poll() is None and time.monotonic() < deadline, self.story()[-4000:]
            time.sleep(0.002)

    def kill(self, kill: Kill) -> Outcome:
        """Kill the victim inside the step; the command is given again if that was the driver.

        Two kills need an undisturbed iteration between them: the way to the second begins in it.
        """
        worker = self._reach(kill)
        into_s = self._enter(kill, worker)
        victim, family = self.part(kill.victim), self.family()
        before = self._on_record()
        killed = time.monotonic()
        victim.kill()
        gone_s = None
        if kill.victim == "driver":
            self._process.wait()
            gone_s = _wait_gone(family) - killed
            killed = time.monotonic()
            self._start()
        elif victim != worker:
            worker.resume()
        self.until(lambda: self._on_record() > before)
        return Outcome(kill, into_s, time.monotonic() - killed, gone_s)

    def restart(self) -> None:
        """Kill the driver, and with it all it started; then the same command again."""
        family = self.family()
        self.driver.kill()
        self._process.wait()
        _wait_gone(family)
        self._start()

    def _reach(self, kill: Kill) -> psutil.Process:
        """Bring the run to where it has handed the step to its resident, which is held."""
        k = kill.iteration
        self.until(self.manifest(k - 1, "advantages").exists)
        time.sleep(0.1)
        held = _hold(self.part("worker"))  # the driver will ask all residents whether they are ready, this one last
        self.until(self.manifest(k - 1, "publish").exists)
        self._settle()
        for previous, step in zip((None, *STEPS), STEPS[: STEPS.index(kill.step) + 1], strict=False):
            following = self.part(RUNS_ON[step])
            gate = self.driver if following == held else following
            _hold(gate)
            if step == "score" and kill.step != step:
                _hold(self.part(RUNS_ON["replay"]))  # which is handed over at the same time
            held.resume()
            if previous is not None:
                self.until(self.manifest(k, previous).exists)
            if gate == self.driver:
                self.until(lambda process=following: not _at_work(process))
                _hold(following)
                gate.resume()
            held = following
            self._settle()
        return held

    def _settle(self) -> None:
        """Until all that is not held waits for what is: replies have arrived, and the next call is made."""
        used = self._used_s()
        while True:
            time.sleep(LOOK_S)
            before, used = used, self._used_s()
            if used - before < QUIET * LOOK_S:
                return

    def _used_s(self) -> float:
        total = 0.0
        for process in [self.driver, *self.family()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
        return total

    def _enter(self, kill: Kill, worker: psutil.Process) -> float:
        """Let the resident go into the step, and hold it there."""
        manifest = self.manifest(kill.iteration, kill.step)
        while not _at_work(worker):
            _slice(worker, SLICE_S)
        into_s = 0.0
        if kill.step in LONG:
            earlier = json.loads(self.manifest(kill.iteration - 1, kill.step).read_bytes())
            into_s = random.Random(kill.seed).uniform(0.0, 0.4) * earlier["seconds"]
            _slice(worker, into_s)
        assert not manifest.exists(), f"the kill came too late to test anything: {kill}"
        return into_s

    def _on_record(self) -> int:
        return sum(1 for _ in self.folder.glob("[0-9]*/*/manifest.json"))

    def repeated(self) -> list[str]:
        """Which steps were tried again, by the run's own words: they were at work, or met a resident that had died."""
        found = re.finditer(r"([\w-]+) is tried again|going on with (\w+) of iteration", self.story())
        return [match[1] or match[2] for match in found]


def require_equal(run: Ledger, twin: Ledger, iterations: int) -> None:
    """Fails unless two runs consumed the same prompts and have the same metrics, updates and weights, bit for bit."""
    for k in range(iterations):
        for step in STEPS:
            mine, theirs = run.find(run.at(k, step)), twin.find(twin.at(k, step))
            assert mine is not None and theirs is not None, (k, step)
            for field in ("key", "content_digest", "facts"):
                assert getattr(mine, field) == getattr(theirs, field), (k, step, field)
            metrics = set(mine.metrics.items()) ^ set(theirs.metrics.items())
            assert {name for name, value in metrics if value == value} <= TIMES, (k, step, metrics)


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return (process.cmdline() or [""])[0]
    return ""


def _at_work(process: psutil.Process) -> bool:
    return ".run" in _title(process)


def _hold(process: psutil.Process) -> psutil.Process:
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(SLICE_S)
    return process


def _slice(process: psutil.Process, seconds: float) -> None:
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(seconds)
    _hold(process)


def _wait_gone(family: Iterable[psutil.Process]) -> float:
    """When the last of them had ended; fails if one does not."""
    deadline = time.monotonic() + PATIENCE_S
    while left := [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    return time.monotonic()
