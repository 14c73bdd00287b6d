"""Rich tables and pages for the terminal. What a model wrote is printed as it is, never read as markup."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.summary import RunSummary, leading, with_error
from flows.config import RunConfig
from flows.reading import Json
from ops.mismatch import decades

if TYPE_CHECKING:
    from flows.replaying import StepCheck
    from flows.rescoring import Rescored
    from flows.sweeping import Variant
    from infra.deployments import Made
    from infra.doctor import Check
    from tasks.step import Note

SHOWN_AT_AN_END = 10
HEIGHTS = " ▁▂▃▄▅▆▇█"
LISTED = ("trajectory", "status", "reward", "advantage", "answer")
LEFT = {"run", "step", "answer", "trajectory", "check", "found", "why", "status"}
LEFT |= {"field", "column", "first", "recorded", "now", "A", "B", "kind", "what", "name", "metric"}


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in LEFT else "right")
    return made


def plan(console: Console, config: RunConfig, notes: "Sequence[Note]") -> None:
    """The resolved config, and which steps would run, with runs of equal lines drawn together."""
    console.print_json(config.model_dump_json())
    made = table("plan", "iteration", "step", "status", "why")
    for note in _condensed(notes):
        made.add_row(*note)
    console.print(made)


def _condensed(notes: "Sequence[Note]") -> list[tuple[str, str, str, str]]:
    """A line for every step that would run; iterations wholly on record become one line."""
    todo = {note.iteration for note in notes if not note.recorded}
    done = sorted({n.iteration for n in notes if n.iteration is not None} - todo)
    rows = [(f"{done[0]}-{done[-1]}", "all of them", "on record", "")] if done else []
    for note in notes:
        if note.iteration is None or note.iteration in todo:
            where = "-" if note.iteration is None else str(note.iteration)
            status, why = ("on record", "") if note.recorded else ("would run", note.reason)
            rows.append((where, note.step, status, why))
    return rows


def runs(console: Console, rows: Sequence[Json], store: str) -> None:
    if not rows:
        console.print(f"no runs on record in {store}; begin with  rollbook run CONFIG.toml", soft_wrap=True)
        return
    made = table("", "run", "status", "iterations", "reward", "held-out before", "after", "created")
    for r in rows:
        before, after = (r["held_out"][when] or {} for when in ("before", "after"))
        made.add_row(
            r["run"],
            r["status"],
            str(r["iterations"]),
            number(r["reward"]),
            number(before.get("sampled")),
            number(after.get("sampled")),
            r["created_at"][:19],
        )
    console.print(made)


def run(console: Console, found: Json) -> None:
    columns = {
        "reward": "reward/mean",
        "length": "response_length/mean",
        "kl (k3)": "kl/k3",
        "entropy": "entropy/mean",
        "expl. var.": "value/explained_variance",
    }
    made = table(found["run"], "iteration", *columns, "s", "of it orch.")
    for it in found["iterations"]:
        cells = [number(it["metrics"].get(name), ".4f" if "kl" in name else ".3f") for name in columns.values()]
        made.add_row(
            str(it["iteration"]),
            *cells,
            number(it["seconds"]["iteration"], ".2f"),
            number(it["seconds"]["orchestration"], ".2f"),
        )
    console.print(made)
    _evaluations(console, found["evaluations"])
    console.print(_held_out(found["held_out"]))
    tags = "".join(f", {name} = {iteration}" for name, iteration in found["tags"].items())
    console.print(f"training states kept after iterations: {', '.join(map(str, found['states'])) or 'none'}{tags}")


def _held_out(held_out: Json) -> str:
    before, after = held_out["before"] or {}, held_out["after"] or {}
    names = leading(before, after)
    if not names:
        return "held-out: not evaluated"
    return f"held-out: {', '.join(f'{name} {with_error(before, name)} → {with_error(after, name)}' for name in names)}"


def _evaluations(console: Console, found: Sequence[Json]) -> None:
    """Every evaluation of a run; two are told as before and after."""
    if len(found) > 2:
        names = leading(*found)
        made = table("held-out", "iteration", *names)
        for evaluation in found:
            made.add_row(str(evaluation["iteration"]), *(with_error(evaluation, name) for name in names))
        console.print(made)


def iteration(console: Console, found: Json) -> None:
    made = table(f"{found['run']}, iteration {found['iteration']}", "step", "s", "rows", "KiB", "content digest")
    for s in found["steps"]:
        made.add_row(
            s["step"],
            number(s["seconds"], ".2f"),
            str(s["rows"] or "-"),
            f"{s['bytes'] / 1024:.0f}",
            s["content_digest"][:16],
        )
    console.print(made)
    if figures := found["held_out"]:
        told = ", ".join(f"{name} {with_error(figures, name)}" for name in leading(figures))
        console.print(f"held-out, under the policy before: {told}")
    _mismatch(console, found)
    failed = [t for t in found["trajectories"] if t["error"]]
    scored = [t for t in found["trajectories"] if not t["error"]]
    rows = sorted(scored, key=lambda t: (t["reward"] is None, -(t["reward"] or 0.0)))
    listed = table(f"{len(found['trajectories'])} trajectories, best and worst", *LISTED)
    ends = rows if len(rows) <= 2 * SHOWN_AT_AN_END else [*rows[:SHOWN_AT_AN_END], *rows[-SHOWN_AT_AN_END:]]
    for t in ends:
        figures = (number(t["reward"]), number(t["advantage"]))
        listed.add_row(t["trajectory_id"], t["status"], *figures, Text(_short(plain(t["answer"]))))
    console.print(listed)
    if len(rows) > len(ends):
        console.print(f"{len(rows) - len(ends)} more between them; --json has all")
    for t in failed[:SHOWN_AT_AN_END]:
        console.print(Text(f"not scored: {t['trajectory_id']}: {plain(t['error'])}", "red"), soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} not scored in all")


def _mismatch(console: Console, found: Json) -> None:
    """Engine against trainer. Nothing of an iteration without tokens, or replayed before this was measured."""
    seen, m, gap = found["mismatch"], found["metrics"], "engine_logprob_gap"
    if seen is not None and not seen["measured"]:
        console.print(Text(f"engine against trainer: not measured; {seen['reason']}"), soft_wrap=True)
    if seen is None or not seen["measured"] or f"{gap}/max" not in m:
        return
    beyond = ", ".join(f"{m[f'{gap}/above_{limit}']:.2%} beyond {limit}" for limit in ("0.1", "1"))
    ratios = f"{m['engine_ratio/min']:.3g} to {m['engine_ratio/max']:.3g}"
    lines = [
        f"engine against trainer, {sum(seen['counts'])} sampled tokens",
        f"|Δ log-prob| mean {m[f'{gap}/mean']:.2g}, max {m[f'{gap}/max']:.2g}, {beyond}",
        f"KL(engine ‖ trainer) {m['engine_kl/k3']:.2g} nats a token (k3), ratios {ratios}; Δ = trainer - engine:",
        *histogram(seen["edges"], seen["counts"]),
    ]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def histogram(edges: Sequence[float], counts: Sequence[int]) -> tuple[str, str]:
    """Two lines: each bin two characters wide and as high as log(1 + count); below them the powers of ten."""
    top = math.log1p(max(counts)) or 1.0
    heights = (math.ceil((len(HEIGHTS) - 1) * math.log1p(count) / top) for count in counts)
    scale = ""
    for place, value in decades(edges).items():
        scale = scale.ljust(2 * place - (value < 0)) + f"{value:g}".replace("0.", ".")
    return "".join(2 * HEIGHTS[height] for height in heights), scale


def plain(text: str) -> str:
    """Text that a terminal only shows: control characters that a model wrote become visible."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _short(text: str, length: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"{flat[: length - 1]}…"


def checks(console: Console, found: "Sequence[Check]") -> None:
    made = table("", "check", "", "found")
    for check in found:
        made.add_row(check.name, Text("ok", "green") if check.ok else Text("fails", "red"), Text(check.found))
    console.print(made)


def result(console: Console, summary: RunSummary, seconds: float, place: str = "") -> None:
    """What a run came to, and the commands to look closer; `place` is their options for a store of its own."""
    from infra.plots import reward_text

    rewards = [s.metrics["reward/mean"] for s in summary.iterations if s.complete]
    if len(rewards) > 1:
        console.print(Text.from_ansi(reward_text("mean training reward", rewards)))
    console.print(Text(_held_out(dict(summary.held_out)), "bold"))
    console.print(f"{len(rewards)} iterations on record, this command took {seconds:.0f} s", highlight=False)
    console.print(
        "look closer:\n"
        f"  rollbook show {summary.run} --iteration {max(len(rewards) - 1, 0)}{place}      its steps and trajectories\n"
        "  rollbook up                        the pages of MLflow and Prefect",
        highlight=False,
        soft_wrap=True,
    )


def step_checks(console: Console, run: str, iteration: int, checks: "Sequence[StepCheck]") -> None:
    made = table(
        f"{run}, iteration {iteration}, made again from its recorded inputs", "step", "on record", "again", "found"
    )
    for check in checks:
        digests = (check.recorded.content_digest[:12], check.again.content_digest[:12])
        style = "green" if check.equal else "yellow" if check.passed else "red"
        made.add_row(check.step, *digests, Text(check.told(), style))
    console.print(made)


def fork(console: Console, compared: Json) -> None:
    """The steps of a fork beside its parent's, with the metrics that moved."""
    for step in compared["steps"]:
        title = f"{step['step']} of iteration {compared['iteration']}"
        if step["equal"] or not step["metrics"]:
            console.print(f"{title}: {'as' if step['equal'] else 'other than'} in {compared['parent']}")
            continue
        made = table(title, "metric", compared["parent"], compared["run"])
        for name, (before, after) in sorted(step["metrics"].items()):
            made.add_row(name, number(before, ".5g"), number(after, ".5g"))
        console.print(made)
    run = compared["run"]
    console.print(f"on record as {run}; go on from there with  rollbook resume {run} --more N", soft_wrap=True)


def variants(console: Console, title: str, found: "Sequence[Variant]", shown: Sequence[str]) -> None:
    """A row for each variant of a sweep: its settings, and the metrics in which variants differ."""
    names = list(found[0].settings)
    short = [name.split(".")[-1] for name in names]
    made = table(title, *(short if len(set(short)) == len(short) else names), *shown, "s")
    for variant in found:
        cells = [number(variant.metrics.get(name), ".4g") for name in shown]
        made.add_row(*(variant.settings[name] for name in names), *cells, number(variant.seconds, ".2f"))
    console.print(made)


def rescored(console: Console, title: str, found: "Sequence[Rescored]") -> None:
    columns = {
        "reward before": "reward/before",
        "after": "reward/after",
        "failed": "reward/failed_after",
        "rewards changed": "reward/changed",
        "correlation": "reward/correlation",
        "advantages flipped": "advantage/flipped",
        "their correlation": "advantage/correlation",
    }
    made = table(title, "iteration", *columns)
    for row in found:
        made.add_row(str(row.iteration), *(number(row.metrics.get(name)) for name in columns.values()))
    console.print(made)


def deployments(console: Console, run: str, made: "Sequence[Made]", timezone: str, api: str, worker: str) -> None:
    """What `rollbook deploy` made, where it is seen, and what is still to be done."""
    for one in made:
        when = f"{one.cron} {timezone}" if one.cron else "when asked"
        console.print(f"{one.name:<28} {when:<20} {one.url}", highlight=False, soft_wrap=True)
    console.print(
        f"\nthe work is done by a worker on this machine   {worker}\n"
        f"one training now                               PREFECT_API_URL={api} prefect deployment run "
        f"continue-training/{run}\n"
        f"take all this away                             rollbook deploy {run} --remove",
        highlight=False,
        soft_wrap=True,
    )
