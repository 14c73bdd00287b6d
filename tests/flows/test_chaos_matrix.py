"""Each of four processes killed inside each of the six steps: 24 runs, one seed each, all as their undisturbed twins.

ROLLBOOK_CHAOS_REPORT names a file that gets a line of JSON a run; tests/flows/chaos_table.py makes docs/reliability.md
of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from data.ledger import Ledger
from tests.flows.chaos import RUNS_ON, STEPS, VICTIMS, Kill, Running, require_equal

pytestmark = pytest.mark.slow
CELLS = [Kill(victim, step, 1, seed) for seed, (victim, step) in enumerate((v, s) for v in VICTIMS for s in STEPS)]
SHORT = ("iterations=2", "evaluate.problems=8")


@pytest.fixture(scope="module")
def twins(desk: Callable[[str], Any]) -> Any:
    """An undisturbed run of every seed, in a fresh store."""
    made = desk("twins")
    program, path = str(Path(__file__).parent / "twins.py"), made.small()[1]
    seeds = ",".join(str(cell.seed) for cell in CELLS)
    command = [sys.executable, program, path, seeds, *made.small(*SHORT)[2:]]
    subprocess.run(command, cwd=made.folder, env=made.environment, check=True, timeout=550)
    return made


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.victim}-{cell.step}".replace(" ", ""))
def test_killed_run_ends_as_its_undisturbed_twin(cell: Kill, desk: Callable[[str], Any], twins: Any) -> None:
    mine, name = desk("cell"), f"seed-{cell.seed}"
    with Running(mine, mine.small(*SHORT, f"run={name}", f"seed={cell.seed}")) as running:
        outcome = running.kill(cell)
        running.finish()
    repeated = running.repeated()
    assert (cell.step in repeated) == (cell.victim in ("driver", RUNS_ON[cell.step]))
    ledgers = [Ledger(made.ledger.store, name) for made in (mine, twins)]
    require_equal(ledgers[0], ledgers[1], 2)
    assert mine.json("show", name)["held_out"] == twins.json("show", name)["held_out"]
    if report := os.environ.get("ROLLBOOK_CHAOS_REPORT"):
        last = ledgers[0].find(ledgers[0].at(1, "publish"))
        assert last is not None
        line = asdict(outcome) | {"repeated": repeated, "weights": last.content_digest}
        with Path(report).open("a") as file:
            file.write(json.dumps(line) + "\n")
