"""Processes killed with kill -9, and runs that are stopped: the same command goes on, to the same end."""

import datetime
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.chaos import STEPS, Kill, Running, require_equal

ITERATIONS = 9


@dataclass(frozen=True)
class Stopped:
    """A run that nothing disturbed for ITERATIONS iterations, before `rollbook stop` ended it."""

    desk: Any
    driver: int
    status: str  # while it ran
    busy: str  # what a second driver was told
    stop: str
    said: str
    code: int


@pytest.fixture(scope="module")
def stopped(desk: Callable[[str], Any]) -> Stopped:
    mine = desk("stopped")
    driver = subprocess.Popen(
        mine.command(*mine.small("iterations=500")), cwd=mine.folder, env=mine.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (mine.folder / f".rollbook/store/small/{ITERATIONS - 1:06d}/publish/manifest.json").exists():
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    status = mine.json("ls")["runs"][0]["status"]
    busy = mine.run(code=1)
    family = psutil.Process(driver.pid).children(recursive=True)
    stop = mine.rollbook("stop", "small")
    said, _ = driver.communicate(timeout=60)
    psutil.wait_procs(family, timeout=30)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return Stopped(mine, driver.pid, status, busy, stop, said, driver.returncode)


def kills_of_today() -> list[Kill]:
    """Each process once, each in another step; the commit, or else the day, turns to the next four of 24."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    turn = int(asked.stdout, 16) if asked.returncode == 0 else datetime.date.today().toordinal()
    victims = ("engine", "trainer 0", "worker", "driver")  # that one last: all others then die with it
    return [Kill(victim, STEPS[(turn + i) % len(STEPS)], 1 + 2 * i, turn % 2**32) for i, victim in enumerate(victims)]


def test_c21_run_whose_every_process_was_killed_ends_as_the_undisturbed_one(
    desk: Callable[[str], Any], stopped: Stopped
) -> None:
    """Its residents are cold again and again, the other's stay warm. What was on record is not made again.

    The last kill is not in the last iteration, after which evaluations would be next.
    """
    mine = desk("killed")
    with Running(mine, mine.small(f"iterations={ITERATIONS}")) as running:
        for kill in kills_of_today():
            before = {path: path.stat().st_mtime_ns for path in manifests(mine)}
            running.kill(kill)
            assert {path: path.stat().st_mtime_ns for path in before} == before, kill
        running.finish()
    # A stopped worker is let go by the kernel when its driver dies, and may still finish the step that it was in.
    # Replay runs beside score, and may have ended before.
    at, beside = STEPS.index(kill.step), kill.step == "score"
    possible = (STEPS * 2)[at : at + 2 + beside]
    assert running.repeated()[0] in possible and kill.victim == "driver"
    require_equal(mine.ledger, stopped.desk.ledger, ITERATIONS)
    starts = mine.ledger.store.list_dirs("small/drivers")
    assert starts == ["000001", "000002"]  # and each was a driver's claim to the run


def manifests(desk: Any) -> list[Path]:
    """Of what is never removed: training states may go."""
    found = sorted((desk.folder / ".rollbook/store").rglob("manifest.json"))
    return [path for path in found if "checkpoints" not in path.parts]


def test_stop_ends_cleanly_and_the_command_resumes(stopped: Stopped) -> None:
    """`rollbook stop` from another terminal: exit code 130, no process left, the log says so, and ls shows it."""
    mine = stopped.desk
    assert stopped.status == "running"
    assert f"process {stopped.driver}" in stopped.busy and "rollbook stop small" in stopped.busy
    assert f"stopped small (process {stopped.driver})" in stopped.stop
    assert stopped.code == 130 and "the same command goes on" in stopped.said
    assert mine.json("ls")["runs"][0]["status"] == "stopped"
    assert "nothing to stop" in mine.rollbook("stop", "small", code=1)
    assert "reward" in mine.rollbook("logs", "small")
    done = mine.json("ls")["runs"][0]["iterations"]
    mine.run(f"iterations={done + 1}")
    assert mine.json("ls")["runs"][0]["iterations"] == done + 1


def test_a_stop_while_it_starts_leaves_nothing(desk: Callable[[str], Any]) -> None:
    """Prefect's server and Ray are on their way, and no driver is on record yet."""
    mine = desk("starting")
    with Running(mine, mine.small()) as running:
        running.until(lambda: any("uvicorn" in process.cmdline() for process in running.family()))
        time.sleep(1.0)  # Ray has begun
        running.driver.terminate()
        assert running.driver.wait(60) == 130, running.story()
        assert "stopped; the same command goes on" in running.story()
    assert not running.folder.exists()  # of the run nothing is on record
