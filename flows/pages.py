"""What people read of an iteration: a line in the terminal, a page in Prefect and MLflow, a report, plots."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data.ledger import Ledger
from data.report import report
from data.summary import ERROR, IterationSummary, with_error
from infra.report.page import page

SHORT = {
    "generate": "gen",
    "score": "score",
    "replay": "replay",
    "advantages": "adv",
    "train": "train",
    "publish": "pub",
}


def artifact_key(run: str) -> str:
    """A run's name as Prefect allows it in artifact keys: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")


def iteration_line(summary: IterationSummary) -> str:
    """One readable line. Times in s; `orch` is what the iteration took beyond its steps."""
    m = summary.metrics
    parts = [f"{summary.iteration:4d}"]
    parts += [f"{label} {m[name]:{form}}" for label, name, form in _SHOWN if name in m]
    parts += [f"failed {m['reward/failed']:.0f}"] if m.get("reward/failed") else []
    times = " ".join(f"{SHORT[step]} {seconds:.2f}" for step, seconds in summary.seconds.items())
    if summary.timing is not None:
        times = f"{summary.timing.seconds:.1f} s: {times} orch {summary.orchestration:.2f}"
        times += f" hand {summary.timing.handing:.2f}" if summary.timing.handing else ""
        times += f" wait {summary.timing.waited:.2f}" if summary.timing.waited else ""
    return "  ".join([*parts, times])


_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("len", "response_length/mean", ".1f"),
    ("kl", "kl/k3", ".4f"),
    ("ent", "entropy/mean", ".2f"),
    ("ev", "value/explained_variance", ".2f"),
)


def iteration_page(summary: IterationSummary) -> str:
    """Markdown: best and worst trajectory, every metric, and where the tables lie."""
    lines = [f"# Iteration {summary.iteration}", ""]
    examples = summary.manifests["score"].facts.get("examples") if "score" in summary.manifests else None
    for name, example in (examples if isinstance(examples, dict) else {}).items():
        lines += _example(name, example)
    if summary.evaluation is not None:
        figures = summary.evaluation.figures
        lines += ["## Held-out problems, under the policy before", "", "| figure | ± standard error |", "|---|---|"]
        lines += [f"| {name} | {with_error(figures, name)} |" for name in figures if not name.endswith(ERROR)]
        lines += [""]
    lines += ["## Metrics", "", "| metric | value |", "|---|---|"]
    lines += [f"| {name} | {value:.6g} |" for name, value in sorted(summary.metrics.items())]
    lines += ["", "## Tables", "", "| step | content digest | manifest |", "|---|---|---|"]
    lines += [f"| {step} | `{m.content_digest[:16]}` | `{m.uri}` |" for step, m in summary.manifests.items()]
    return "\n".join(lines)


def iteration_files(ledger: Ledger, summary: IterationSummary) -> dict[str, Callable[[Path], None]]:
    """Artifacts beside the page, by path, and what makes each: the report of the trajectories, plots."""
    made: dict[str, Callable[[Path], None]] = {}
    if "generate" in summary.manifests:
        made["report.html"] = partial(write_report, ledger, summary)
    found: Any = summary.mismatch
    if found is not None and found["measured"]:
        from infra.plots import histogram_png  # with matplotlib, which only the thread that tells MLflow needs

        title = f"{ledger.run}, iteration {summary.iteration}: engine against trainer"
        label = "Δ log-prob, trainer - engine, nats"
        draw = partial(histogram_png, title=title, label=label, edges=found["edges"], counts=found["counts"])
        made["plots/mismatch.png"] = draw
    return made


def write_report(ledger: Ledger, summary: IterationSummary, file: Path) -> None:
    """Raises LookupError for an iteration that has generated nothing yet, ManifestError for what is altered."""
    file.write_bytes(page(report(ledger, summary)))


def _example(name: str, example: Any) -> list[str]:
    # Indented, so that nothing a model wrote is taken for Markdown.
    conversation = json.dumps(example["messages"], ensure_ascii=False, indent=2).splitlines()
    head = f"## {name.capitalize()}: reward {example['reward']}, trajectory `{example['trajectory_id']}`"
    return [head, "", *(f"    {line}" for line in conversation), ""]
