"""One driver a run: the lock, who holds it, and what is left when it dies."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra.driver import RunBusy, driving, holder_of, stop

HOLD = """
import sys, time
from pathlib import Path
from infra.driver import driving
try:
    with driving(Path(sys.argv[1]), "mine"):
        print("holding", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("let go", flush=True)
"""


@pytest.fixture
def other(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "holding\n"
    yield process
    process.kill()
    process.wait()


def test_second_driver_is_told_who_holds_the_run(other: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(RunBusy, match=rf"process {other.pid} on .*rollbook stop mine"), driving(tmp_path, "mine"):
        pass
    holder = holder_of(tmp_path)
    assert holder is not None and holder.pid == other.pid


def test_stop_is_clean(other: subprocess.Popen[str], tmp_path: Path) -> None:
    holder = holder_of(tmp_path)
    assert holder is not None and stop(holder, grace_s=20)
    assert other.stdout is not None and other.stdout.read() == "let go\n"
    assert holder_of(tmp_path) is None


def test_killed_driver_leaves_the_run_free(other: subprocess.Popen[str], tmp_path: Path) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert holder_of(tmp_path) is None
    with driving(tmp_path, "mine"):
        holder = holder_of(tmp_path)
        assert holder is not None and holder.pid == os.getpid()
    assert holder_of(tmp_path) is None


def test_pid_used_again_is_no_holder(tmp_path: Path) -> None:
    """Our own pid with another start time is another process."""
    (tmp_path / "driver.json").write_text(f'{{"pid": {os.getpid()}, "host": "h", "started": {time.time() - 1e6}}}')
    assert holder_of(tmp_path) is None


RACE = """
import multiprocessing, os, sys, time
from pathlib import Path
from infra.driver import RunBusy, driving

def take(barrier, ended, said):
    for number in range(ROUNDS):
        barrier.wait()
        try:
            with driving(Path(sys.argv[1]) / str(number), "mine"):
                said.put((number, os.getpid(), None))
                ended.wait()
        except RunBusy as busy:
            said.put((number, os.getpid(), str(busy)))
            ended.wait()

ROUNDS, DRIVERS = 25, 4
fork = multiprocessing.get_context("fork")
barrier, ended, said = fork.Barrier(DRIVERS), fork.Barrier(DRIVERS), fork.Queue()
family = [fork.Process(target=take, args=(barrier, ended, said)) for _ in range(DRIVERS)]
for process in family:
    process.start()
print([said.get() for _ in range(ROUNDS * DRIVERS)])
for process in family:
    process.join()
"""


def test_of_drivers_that_start_at_once_one_goes_on_and_all_others_name_it(tmp_path: Path) -> None:
    """25 times, 4 processes released by a barrier: the holder's name may not be written yet when the others ask."""
    done = subprocess.run([sys.executable, "-c", RACE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    told = ast.literal_eval(done.stdout)
    for number in range(25):
        holders = [pid for n, pid, said in told if n == number and said is None]
        refused = [said for n, _, said in told if n == number and said is not None]
        assert len(holders) == 1 and len(refused) == 3
        assert all(f"process {holders[0]} on " in said for said in refused), (holders, refused)


def test_a_patient_driver_gets_the_run_when_the_other_ends(other: subprocess.Popen[str], tmp_path: Path) -> None:
    killer = threading.Timer(1.0, other.kill)
    killer.start()
    with driving(tmp_path, "mine", patience_s=60):
        holder = holder_of(tmp_path)
        assert holder is not None and holder.pid == os.getpid()
    killer.join()
