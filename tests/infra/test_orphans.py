"""A process that is killed leaves nothing behind: not even what ignores signals, or has lost its parent."""

import subprocess
import sys

import psutil

# A driver with a child that never notices, and a grandchild whose parent has ended.
DRIVER = """
import subprocess, sys, time
from infra.orphans import attend
attend()
deaf = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
subprocess.Popen(deaf)
leave = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(2.5)"  # longer than between two looks
subprocess.run([sys.executable, "-c", leave, *deaf])
print("ready", flush=True)
time.sleep(600 if sys.argv[1] == "stay" else 0)
"""


def start(manner: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    process = subprocess.Popen([sys.executable, "-c", DRIVER, manner], stdout=subprocess.PIPE, text=True)
    family = []
    while len(family) < 4:  # watcher, child, its sibling, grandchild
        family = psutil.Process(process.pid).children(recursive=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process, family


def test_killed_process_leaves_nothing() -> None:
    driver, family = start("stay")
    assert sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family) == 3
    driver.kill()
    driver.wait()
    _, left = psutil.wait_procs(family, timeout=30)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_process_that_ends_leaves_nothing() -> None:
    driver, family = start("go")
    driver.wait()
    _, left = psutil.wait_procs(family, timeout=30)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
