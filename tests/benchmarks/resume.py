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

from data.ledger import Address, Ledger, Request
from data.manifest import Manifest
from data.summary import summarize
from flows.config import load
from flows.launch import plan
from flows.session import make_run, open_ledger
from flows.training import begin, one_iteration
from infra.home import Home
from tests.seaweed import seaweed

ROOT = Path(__file__).parents[2]
METRICS = {f"metric/{i}": float(i) for i in range(25)}  # as many as a step of the quickstart has


class Recorder:
    """In the place of a fleet: enters each step without running its body."""

    def warm(self, role: Any) -> None: ...

    def run(
        self, role: Any, wrapper: Any, body: Any, ledger: Ledger, address: Address, request: Request, *rest: Any
    ) -> Manifest:
        facts = {"policy_version": address.iteration or 0, "cursor": {"start": 0, "end": 1}}
        metrics = METRICS | {"reward/mean": 0.5}
        return ledger.writer(address, request).commit(metrics=metrics, facts=facts, content_digest=request.key)


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(place: str, store: str, iterations: int) -> None:
    config = load(ROOT / "flows/configs/sort.toml", [f"resources.store={store}", f"iterations={iterations}"])
    home = Home.find()
    home.prepare()
    ledger = open_ledger(config, home)
    ledger.open_or_create(config)
    run = make_run(config, ledger, home)
    run.fleet, run.watchers = Recorder(), ()  # ty: ignore[invalid-assignment]
    head = begin(config, run)
    for k in range(iterations):
        head = one_iteration(config, run, k, head)
    notes: list[Any] = []
    planned = seconds(lambda: notes.extend(plan(config)))
    waiting = [note for note in notes if not note.recorded]
    assert {note.iteration for note in waiting} <= {0, iterations}, waiting[:3]  # the evaluations
    listed = seconds(lambda: summarize(ledger))
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
