"""What a killed driver leaves behind: a small process, started first, outlives it and ends what does not end itself.

Ray's processes do, two of them after a minute; the run's own Prefect server never does.
"""

import contextlib
import functools
import select
import subprocess
import sys

import psutil

LOOK_S = 1.0
GRACE_S = 2.0  # for those that end by themselves


@functools.cache
def attend() -> subprocess.Popen[bytes]:
    """Start, once, the process that watches this one. It sees its end by a pipe that only this one holds open."""
    command = [sys.executable, "-P", "-m", "infra.orphans", str(psutil.Process().pid)]
    # A session of its own: Ctrl-C must not reach it. No output: whoever reads the driver's waits for its last holder.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def watch(driver: psutil.Process) -> set[psutil.Process]:
    """Wait for the driver's end; every living process that was seen below it."""
    seen: set[psutil.Process] = set()
    while True:
        seen = {process for process in seen if process.is_running()}
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= set(driver.children(recursive=True))
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            return seen - {psutil.Process()}


def end(family: set[psutil.Process]) -> None:
    """Kill what is left after GRACE_S, with what it has started since."""
    _, left = psutil.wait_procs(family, timeout=GRACE_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            for below in process.children(recursive=True):
                below.kill()
            process.kill()


if __name__ == "__main__":
    end(watch(psutil.Process(int(sys.argv[1]))))
