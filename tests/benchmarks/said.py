"""What a benchmark says: on the terminal, and into a file of its name in $OUT where that is set."""

import os
import sys
from pathlib import Path


def say(line: str) -> None:
    print(line, flush=True)
    if out := os.environ.get("OUT"):
        with (Path(out) / f"{Path(sys.argv[0]).stem}.txt").open("a") as file:
            file.write(line + "\n")
