"""`rollbook rerun`, `resume`, `sweep` and `rescore`: what is on record, once more or otherwise."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from data.config import SCORER_NAMES
from data.ledger import Ledger, require_record
from flows import views
from flows.commands import AsJson, Endpoint, Overrides, StoreUrl, beside, command, console, open_store
from infra.home import Home

Plot = Annotated[Path | None, typer.Option("--plot", help="Write the picture here as well.")]

WhichIteration = Annotated[int | None, typer.Option("--iteration", help="Which; an MLflow run of one says it.")]
FirstStep = Annotated[
    str | None, typer.Option("--from", metavar="STEP", help="generate, score, replay, advantages, train or publish.")
]


@command
def rerun(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the id of an MLflow run.")],
    iteration: WhichIteration = None,
    first: FirstStep = None,
    through: Annotated[str | None, typer.Option("--through", metavar="STEP", help="The last step to run.")] = None,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with what is on record; keep nothing.")] = False,
    more: Annotated[int, typer.Option("--continue", metavar="N", min=0, help="Then train N more iterations.")] = 0,
    fork: Annotated[str | None, typer.Option("--name", help="Of the fork; else made of run, step and changes.")] = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Repeat steps of a recorded iteration from exactly what they ran on. The original stays as it is.

    The result is a fork: a run that shares the history before the step. With --verify it is only compared.
    """
    home, opened = open_store(store, store_endpoint)
    from flows import replaying
    from flows.launch import launch

    run, number = _which(home, name, iteration)
    ledger = Ledger(opened, run)
    if verify:
        if overrides or more or fork:
            raise ValueError("--verify repeats what is on record: leave out --set, --continue and --name")
        _verify(ledger, number, first or "score", through or "publish", as_json)
        return
    made = replaying.branch(ledger, number, first, overrides or [], fork, more)
    last = None if more and through is None else through or "publish"
    replaying.require_order(made.fork.step, last or "publish")
    made.create(ledger)
    launch(made.config, beside if as_json else console, last)
    compared = replaying.compare_with_parent(Ledger(opened, made.config.run), number)
    if as_json:
        print(json.dumps(compared))
    else:
        views.fork(console, compared)


def _which(home: Home, name: str, iteration: int | None) -> tuple[str, int]:
    """Run and iteration; `name` may be the id of an MLflow run."""
    from infra.tracking import run_of

    run, recorded_at = run_of(home.tracking_uri, name) or (name, None)
    number = iteration if iteration is not None else recorded_at
    if number is None:
        raise ValueError(f"--iteration: which iteration of {run!r}? `rollbook show {run}` lists them")
    return run, number


def _verify(ledger: Ledger, iteration: int, first: str, through: str, as_json: bool) -> None:
    """Exit code 1 unless every step came out as it is on record."""
    from flows import replaying
    from flows.launch import at_hand

    replaying.require_order(first, through)
    replaying.require_iteration(ledger, iteration)
    with at_hand():
        checks = replaying.verify_steps(replaying.recorded_config(ledger), iteration, first, through)
    passed = all(check.passed for check in checks)
    if as_json:
        print(json.dumps({"passed": passed, "steps": [check.as_json() for check in checks]}))
    else:
        views.step_checks(console, ledger.run, iteration, checks)
    if not passed:
        raise typer.Exit(1)


@command
def resume(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    more: Annotated[int, typer.Option("--more", metavar="N", min=0, help="Iterations beyond those on record.")] = 0,
    overrides: Overrides = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """Go on with a run or fork, with the config on record. Settings that change no result may be --set."""
    _, opened = open_store(store, store_endpoint)
    from flows import replaying
    from flows.launch import launch

    ledger = Ledger(opened, name)
    launch(replaying.longer(ledger, more, overrides or []), console)


@command
def sweep(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the id of an MLflow run.")],
    grid: Annotated[list[str], typer.Option("--grid", metavar="a.b=1,2,3", help="Values to try; may be repeated.")],
    iteration: WhichIteration = None,
    held_out: Annotated[bool, typer.Option("--evaluate", help="Held-out accuracy of every variant too.")] = False,
    plot: Plot = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Variants of advantages and training over the same stored rollouts. What variants share is made once."""
    home, opened = open_store(store, store_endpoint)
    from flows import replaying, sweeping
    from flows.launch import at_hand
    from infra.plots import dots_png

    run, number = _which(home, name, iteration)
    ledger = Ledger(opened, run)
    replaying.require_iteration(ledger, number)
    config = replaying.recorded_config(ledger)
    with at_hand():
        found = sweeping.sweep(config, number, grid, held_out)
    shown = sweeping.telling(found)
    title = f"{run}, iteration {number}: {', '.join(grid)}"
    columns = {metric: [v.metrics.get(metric, float("nan")) for v in found] for metric in shown}
    told = _Told(
        role="sweep",
        name=f"{run}/{number} sweep {_short([*grid, held_out])}",
        parts=[(v.name, v.settings, v.metrics, number) for v in found],
        table=[v.as_json() for v in found],
        picture=lambda path: dots_png(path, title, [v.name for v in found], columns),
    )
    told.tell(home, run, plot)
    if as_json:
        print(json.dumps({"run": run, "iteration": number, "variants": told.table}))
    else:
        views.variants(console, title, found, shown)


@command
def rescore(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    scorer: Annotated[str, typer.Option("--scorer", help=f"{', '.join(SCORER_NAMES)}, or path/to/file.py:function.")],
    iterations: Annotated[str, typer.Option("--iterations", metavar="A:B", help="From A up to, not with, B.")] = ":",
    overrides: Overrides = None,
    plot: Plot = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Another reward function over stored rollouts: how rewards and advantages would have been."""
    home, opened = open_store(store, store_endpoint)
    from flows import replaying, rescoring
    from flows.launch import at_hand
    from infra.plots import lines_png

    ledger = Ledger(opened, name)
    before: Any = require_record(ledger).config["reward"]
    config = replaying.recorded_config(ledger, [*(overrides or []), f"reward.scorer={scorer}"])
    chosen = rescoring.choose(ledger, iterations)
    with at_hand():
        found = rescoring.rescore(config, chosen)
    title = f"{name}: mean reward by {before['scorer']} (before) and {scorer} (after)"
    means = {when: [r.metrics.get(f"reward/{when}", float("nan")) for r in found] for when in ("before", "after")}
    told = _Told(
        role="rescore",
        name=f"{name} rescore {_short([found[-1].rewards, chosen])}",
        parts=[(f"{name}/{r.iteration} {scorer}", {}, r.metrics, r.iteration) for r in found],
        table=[r.as_json() for r in found],
        picture=lambda path: lines_png(path, title, chosen, means),
    )
    told.tell(home, name, plot)
    if as_json:
        print(json.dumps({"run": name, "iterations": told.table}))
    else:
        views.rescored(console, title, found)


def _short(asked: list[Any]) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class _Told:
    """What MLflow is told of a sweep or a rescoring."""

    role: str
    name: str
    parts: Sequence[tuple[str, Mapping[str, str], Mapping[str, float], int]]
    table: list[dict[str, Any]]
    picture: Callable[[Path], None]

    def tell(self, home: Home, run: str, plot: Path | None) -> None:
        """A nested run for each part, the table, and the picture, which also goes where the user wants it."""
        from infra.comparisons import Part, record

        if plot is not None:
            self.picture(plot)
        files = {f"{self.role}.json": self._write, f"{self.role}.png": self.picture}
        lost = record(
            home.tracking_uri,
            home.mlflow_artifacts,
            run,
            self.role,
            self.name,
            [Part(*part) for part in self.parts],
            files,
        )
        if lost:
            said = f"MLflow: {lost}. All is on record; the same command tells MLflow later"
            beside.print(said, style="yellow", soft_wrap=True)

    def _write(self, path: Path) -> None:
        path.write_text(json.dumps(self.table, indent=1))
