"""`report.html`: an iteration's report as one file that needs nothing else, for MLflow's viewer or any browser.

What a model wrote is data there: JSON in which no character can end the script, shown as text only. The page's policy
allows its own scripts by hash, and nothing from anywhere.
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LIBRARIES = ("vendor/tabulator.min.js", "vendor/uPlot.iife.min.js")
OWN = ("shared.js", "table.js", "histograms.js", "trajectory.js", "strip.js", "page.js")  # one script, in this order
STYLES = ("vendor/tabulator_simple.min.css", "vendor/uPlot.min.css", "page.css")
LICENSES = ("vendor/tabulator.LICENSE", "vendor/uPlot.LICENSE")
ESCAPES = {c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(report: dict[str, Any]) -> bytes:
    """The page of what `data.report` gives."""
    head, tail = _frame()
    return head + _as_json(report) + tail


def _as_json(value: Any) -> bytes:
    """JSON that stays within its script element whatever it says; a lone surrogate stays the escape that it came as."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text.encode("utf-8", "backslashreplace")


@cache
def _frame() -> tuple[bytes, bytes]:
    """What stands before and after the data, the same in every page."""
    styles = ["\n".join(_read(name) for name in STYLES)]
    scripts = [*map(_read, LIBRARIES), "\n".join(map(_read, OWN))]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
        "base-uri 'none'; form-action 'none'"
    )
    licenses = "\n\n".join(_read(name) for name in LICENSES).replace("--", "- -")
    body = _read("page.html").replace("{{policy}}", policy).replace("{{licenses}}", licenses)
    head, tail = body.replace("{{style}}", styles[0]).split("{{data}}")
    return head.encode(), tail.replace("{{scripts}}", "".join(f"<script>{s}</script>\n" for s in scripts)).encode()


def _read(name: str) -> str:
    """Without the line that tells a debugger where to fetch the source."""
    lines = (FOLDER / name).read_text().split("\n")
    return "\n".join(line for line in lines if "sourceMappingURL=" not in line)


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)
