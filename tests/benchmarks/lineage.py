"""How long lineage takes in a run with many recorded iterations: the first time, and when the index is there.

python tests/benchmarks/lineage.py [ITERATIONS]        default 1000; on a folder, and on SeaweedFS
"""

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["ROLLBOOK_HOME"] = tempfile.mkdtemp(prefix="rollbook-benchmark-")

from rich.console import Console

from data.index import Index
from data.ledger import Ledger
from data.lineage import trace
from data.references import resolve
from flows.config import load
from infra.home import Home
from tests.recorder import record_run
from tests.seaweed import seaweed

ROOT = Path(__file__).parents[2]


def ask(ledger: Ledger, folder: Path, ref: str) -> tuple[float, int]:
    """(seconds, how many recorded things are up and down from it)"""
    started = time.perf_counter()
    index = Index(ledger.store, folder)
    found = trace(index, resolve(index, ref))
    found.as_json()
    index.close()
    return time.perf_counter() - started, len(found.up) + len(found.down)


def measure(place: str, store: str, iterations: int) -> None:
    config = load(ROOT / "flows/configs/sort.toml", [f"resources.store={store}", f"iterations={iterations}"])
    home = Home.find()
    home.prepare()
    ledger = record_run(config, home, iterations)[0].ledger
    with tempfile.TemporaryDirectory() as folder:
        first, _ = ask(ledger, Path(folder), "sort/0/publish")
        for ref in ("sort/0/publish", f"sort/{iterations // 2}/generate", f"sort/{iterations - 1}/publish"):
            took, count = ask(ledger, Path(folder), ref)
            Console().print(f"{place}, {iterations} iterations: {ref}: {count} related things in {took:.2f} s")
        Console().print(f"{place}: the index was made in {first:.2f} s")


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
