"""What SGLang said before it died, in a line: for memory with the settings that help."""

from pathlib import Path

from data.memory import KNOBS

LAST_LINES = 400
MEMORY = ("out of memory", "OutOfMemory", "Not enough memory")
NOISE = ("Traceback", "File ", "^", "raise ", "During handling", "The above exception", "Received sigquit", "killed by")


def explain(log: Path, otherwise: str) -> str:
    """The most telling line of SGLang's log, or `otherwise` if it has none."""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.is_file() else []
    for line in reversed(lines):
        if any(word in line for word in MEMORY):
            return f"{line.strip()[:300]}; {KNOBS}"
    errors = [
        line.strip() for line in lines if ("Error" in line or "error:" in line) and not line.strip().startswith(NOISE)
    ]
    return errors[-1][:300] if errors else otherwise
