"""kill -9 of the whole run in the middle of `train`, then the same command: nothing repeated, nothing lost (C21)."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

KILLED_IN = 1  # iteration


def kill_in_train(desk: Any) -> list[psutil.Process]:
    """Start the run and kill its driver once the advantages of one iteration are in and its train step is at work."""
    driver = subprocess.Popen(
        desk.command(*desk.small()),
        cwd=desk.folder,
        env=desk.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    folder = desk.folder / f".rollbook/store/small/{KILLED_IN:06d}"
    wait_for(folder / "generate/manifest.json", driver)
    family = psutil.Process(driver.pid).children(recursive=True)  # takes a while: not when it matters
    wait_for(folder / "advantages/manifest.json", driver)
    time.sleep(0.02)  # into the optimizer steps
    for process in [psutil.Process(driver.pid), *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    driver.wait()
    assert not (folder / "train/manifest.json").exists(), "the kill came too late to test anything"
    return family


def wait_for(file: Path, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 400
    while not file.exists():
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def test_c21_killed_run_ends_as_the_undisturbed_one(desk: Callable[[str], Any], finished: tuple[Any, str]) -> None:
    """The twin ran in a fresh folder. Equal: prompts consumed, lr of every update, metrics, and the weights' digest."""
    twin, _ = finished
    killed = desk("killed")
    family = kill_in_train(killed)
    psutil.wait_procs(family, timeout=30)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    before = {path: path.stat().st_mtime_ns for path in manifests(killed)}

    said = killed.run()
    assert f"going on with train of iteration {KILLED_IN}" in said
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was on record was not made again

    for k in range(3):
        for step in ("generate", "score", "replay", "advantages", "train", "publish"):
            assert killed.manifest(k, step).content_digest == twin.manifest(k, step).content_digest, (k, step)
            assert killed.manifest(k, step).key == twin.manifest(k, step).key
        assert killed.manifest(k, "generate").facts["cursor"] == twin.manifest(k, "generate").facts["cursor"]
        assert killed.manifest(k, "train").facts["updates"] == twin.manifest(k, "train").facts["updates"]
    assert killed.json("show", "small")["held_out"] == twin.json("show", "small")["held_out"]


def manifests(desk: Any) -> list[Path]:
    return sorted((desk.folder / ".rollbook/store").rglob("manifest.json"))


def test_stop_ends_cleanly_and_the_command_resumes(desk: Callable[[str], Any]) -> None:
    """`rollbook stop` from another terminal: exit code 130, no process left, the log says so, and ls shows it."""
    mine = desk("stopped")
    driver = subprocess.Popen(
        mine.command(*mine.small("iterations=500")), cwd=mine.folder, env=mine.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (mine.folder / ".rollbook/store/small/000000/publish/manifest.json").exists():
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert mine.json("ls")["runs"][0]["status"] == "running"
    busy = mine.run(code=1)
    assert f"process {driver.pid}" in busy and "rollbook stop small" in busy
    family = psutil.Process(driver.pid).children(recursive=True)
    assert f"stopped small (process {driver.pid})" in mine.rollbook("stop", "small")
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130 and "the same command goes on" in said
    psutil.wait_procs(family, timeout=30)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert mine.json("ls")["runs"][0]["status"] == "stopped"
    assert "nothing to stop" in mine.rollbook("stop", "small", code=1)
    assert "reward" in mine.rollbook("logs", "small")
    iterate_alone(mine, mine.json("ls")["runs"][0]["iterations"])


def iterate_alone(desk: Any, iteration: int) -> None:
    """The flow `iterate` does the next iteration, and refuses one whose predecessors are missing."""
    config = desk.small("iterations=500")
    code = (
        "from infra.home import Home; Home.find().set_environment(); Home.find().prepare()\n"
        "import sys; from flows.config import load; from flows.training import iterate\n"
        "iterate(load(sys.argv[1], sys.argv[4::2]), int(sys.argv[2]))"
    )

    def call(number: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, config[1], str(number), *config[2:]]
        return subprocess.run(
            command, cwd=desk.folder, env=desk.environment, capture_output=True, text=True, timeout=300
        )

    refused = call(iteration + 1)
    assert refused.returncode != 0 and f"iteration {iteration} is not on record" in refused.stderr
    done = call(iteration)
    assert done.returncode == 0, done.stderr[-2000:]
    assert desk.json("ls")["runs"][0]["iterations"] == iteration + 1
