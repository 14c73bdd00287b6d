"""`python tests/flows/chaos_table.py REPORT`: the chaos matrix's report as the table in docs/reliability.md."""

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
PLACE = re.compile(r"(<!-- chaos table -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER = (
    "| killed | inside | seed | tried again | s to useful work | s until all processes were gone | weights of both |\n"
    "|---|---|---|---|---|---|---|\n"
)


def row(line: dict[str, Any]) -> str:
    kill, gone = line["kill"], line["gone_s"]
    inside = kill["step"] + (f", {1000 * line['into_s']:.0f} ms in" if line["into_s"] else "")
    cells = [
        kill["victim"],
        inside,
        kill["seed"],
        ", ".join(line["repeated"]) or "nothing",
        f"{line['useful_s']:.1f}",
        "" if gone is None else f"{gone:.1f}",
        f"`{line['weights'].removeprefix('sha256:')[:8]}`",
    ]
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    lines = sorted(
        (json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()), key=lambda x: x["kill"]["seed"]
    )
    table = HEADER + "".join(map(row, lines))
    PAGE.write_text(PLACE.sub(lambda match: match[1] + table + match[2], PAGE.read_text()))
