"""The flow `iterate`: one iteration of a run, for programs and schedules of one's own."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.flows.conftest import SMALL, SORT

PROGRAM = """
from infra.home import Home; Home.find().set_environment(); Home.find().prepare()
import sys
from flows.config import load
from flows.training import iterate
config = load(sys.argv[1], sys.argv[2:])
try:
    iterate(config, 4)
except ValueError as refused:
    print(refused)
iterate(config, 3)
"""


def test_it_does_the_next_iteration_and_refuses_one_whose_predecessors_are_missing(
    desk: Callable[[str], Any], finished: tuple[Any, str]
) -> None:
    """In a process that has no Prefect server: Prefect starts one."""
    mine = desk("iterate")
    shutil.copytree(finished[0].folder / ".rollbook/store", mine.folder / ".rollbook/store")
    command = [sys.executable, "-c", PROGRAM, str(SORT), *SMALL, "iterations=8"]
    done = subprocess.run(command, cwd=mine.folder, env=mine.environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "iteration 3 is not on record" in done.stdout
    assert mine.json("ls")["runs"][0]["iterations"] == 4
