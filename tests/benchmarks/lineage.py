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
from tests.recorder import in_both_places


def ask(ledger: Ledger, folder: Path, ref: str) -> tuple[float, int]:
    """(seconds, how many recorded things are up and down from it)"""
    started = time.perf_counter()
    index = Index(ledger.store, folder)
    found = trace(index, resolve(index, ref))
    found.as_json()
    index.close()
    return time.perf_counter() - started, len(found.up) + len(found.down)


def main() -> None:
    iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    refs = ("sort/0/publish", f"sort/{iterations // 2}/generate", f"sort/{iterations - 1}/publish")
    for place, _, run in in_both_places(iterations):
        with tempfile.TemporaryDirectory() as folder:
            first, _ = ask(run.ledger, Path(folder), "sort/0/publish")
            for ref in refs:
                took, count = ask(run.ledger, Path(folder), ref)
                Console().print(f"{place}, {iterations} iterations: {ref}: {count} related things in {took:.2f} s")
            Console().print(f"{place}: the index was made in {first:.2f} s")


if __name__ == "__main__":
    main()
