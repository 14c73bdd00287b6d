"""How long a run with many recorded iterations takes until it knows what is left to do.

    python tests/benchmarks/resume.py [ITERATIONS]        default 1000; on a folder, and on SeaweedFS

The ledger is real and so are all keys; only the steps' bodies are left out, so manifests list no files.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ["ROLLBOOK_HOME"] = tempfile.mkdtemp(prefix="rollbook-benchmark-")

from rich.console import Console

from data.summary import summarize
from flows.launch import plan
from tests.recorder import in_both_places


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for place, config, run in in_both_places(iterations):
        notes: list[Any] = []
        planned = seconds(lambda config=config, notes=notes: notes.extend(plan(config)))
        waiting = [note for note in notes if not note.recorded]
        assert {note.iteration for note in waiting} <= {0, iterations}, waiting[:3]  # the evaluations
        listed = seconds(lambda run=run: summarize(run.ledger))
        Console().print(
            f"{place}: {iterations} iterations, {len(notes)} steps known after {planned:.2f} s "
            f"({1000 * planned / iterations:.2f} ms an iteration); `show` reads all in {listed:.2f} s"
        )


if __name__ == "__main__":
    main()
