"""How long a run with many recorded iterations takes until it knows what is left to do.

    python tests/benchmarks/resume.py [ITERATIONS]        default 1000; on a folder, and on SeaweedFS

The ledger is real and so are all keys; only the steps' bodies are left out, so manifests list no files.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["ROLLBOOK_HOME"] = tempfile.mkdtemp(prefix="rollbook-benchmark-")

from rich.console import Console

from data.summary import summarize
from flows.config import load
from flows.launch import plan
from infra.home import Home
from tests.recorder import record_run
from tests.seaweed import seaweed

ROOT = Path(__file__).parents[2]


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(place: str, store: str, iterations: int) -> None:
    config = load(ROOT / "flows/configs/sort.toml", [f"resources.store={store}", f"iterations={iterations}"])
    home = Home.find()
    home.prepare()
    run, _ = record_run(config, home, iterations)
    notes: list[Any] = []
    planned = seconds(lambda: notes.extend(plan(config)))
    waiting = [note for note in notes if not note.recorded]
    assert {note.iteration for note in waiting} <= {0, iterations}, waiting[:3]  # the evaluations
    listed = seconds(lambda: summarize(run.ledger))
    Console().print(
        f"{place}: {iterations} iterations, {len(notes)} steps known after {planned:.2f} s "
        f"({1000 * planned / iterations:.2f} ms an iteration); `show` reads all in {listed:.2f} s"
    )


def main() -> None:
    iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        measure("folder", f"file://{folder}/store", iterations)
        (Path(folder) / "weed").mkdir()
        with seaweed(Path(folder) / "weed") as server:
            os.environ.update(server.environment)
            measure("SeaweedFS", server.place(), iterations)


if __name__ == "__main__":
    main()
