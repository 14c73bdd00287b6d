"""`rollbook`: run, look at and stop trainings. Every command says what it did, or one line on what is wrong."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from data.checkpoints import Checkpoints
from data.config import ResourcesConfig
from data.ledger import Ledger, list_runs
from flows import cli_records, cli_replay, cli_schedule, reading, trajectory_views, views
from flows.commands import AsJson, Endpoint, Overrides, StoreUrl, app, command, console, open_store
from flows.config import load
from flows.trajectory_views import By
from infra import driver
from infra.home import Home

MORE_COMMANDS = (cli_records, cli_replay, cli_schedule)  # registered by their import


@command
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file; shipped ones are in flows/configs/.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print config and plan; run nothing.")] = False,
) -> None:
    """Train. What is on record is not done again, so the same command also resumes."""
    parsed = load(config, overrides)
    Home.find().prepare()  # before Prefect is imported, which looks for its folder then
    from flows.launch import launch, plan

    if dry_run:
        views.plan(console, parsed, plan(parsed))
        return
    launch(parsed, console)


@command
def ls(store: StoreUrl = None, store_endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Runs on record, newest first."""
    home, opened = open_store(store, store_endpoint)
    rows = [reading.row(Ledger(opened, record.run), record, home) for record in list_runs(opened)]
    if as_json:
        print(json.dumps({"runs": rows}))
    else:
        views.runs(console, rows, opened.url)


@command
def show(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    iteration: Annotated[int | None, typer.Option("--iteration", help="Its steps and trajectories.")] = None,
    trajectory: Annotated[str | None, typer.Option("--trajectory", help="One conversation, whole.")] = None,
    worst: Annotated[int | None, typer.Option("--worst", min=1, help="So many of the lowest rewards, whole.")] = None,
    best: Annotated[int | None, typer.Option("--best", min=1, help="So many of the highest rewards.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Those that failed, or could not be scored.")] = False,
    group: Annotated[str | None, typer.Option("--group", help="Siblings, by their root or one of them.")] = None,
    by: Annotated[By, typer.Option("--by", help="What the colours of tokens say.")] = By.ADVANTAGE,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """A run, one of its iterations, or trajectories of it; of the last iteration unless one is named."""
    ledger = Ledger(open_store(store, store_endpoint)[1], name)
    summary = reading.require_run(ledger)
    choice = reading.Choice(worst, best, failed, group)
    if trajectory is not None:
        found: Any = reading.trajectory(summary, ledger, trajectory, iteration)
        render: Callable[[Console, Any], None] = partial(trajectory_views.trajectory, by=by)
    elif choice.made:
        found = reading.chosen(summary, ledger, choice, iteration)
        render = partial(trajectory_views.chosen, by=by)
    elif iteration is not None:
        found, render = reading.iteration(summary, ledger, iteration), views.iteration
    else:
        found, render = reading.run(summary, ledger), views.run
    if as_json:
        print(json.dumps(found))
    else:
        render(console, found)


@command
def report(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    file: Annotated[Path, typer.Argument(help="An HTML file to write.")],
    iteration: Annotated[int | None, typer.Option("--iteration", help="By default the last one scored.")] = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """The page about an iteration's trajectories that MLflow has as `report.html`, as a file; for any browser."""
    ledger = Ledger(open_store(store, store_endpoint)[1], name)
    found = reading.find(reading.require_run(ledger), iteration)
    from flows.pages import write_report

    write_report(ledger, found, file)
    console.print(f"iteration {found.iteration} of {name}: {file}", highlight=False, soft_wrap=True)


@command
def logs(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing as the run goes on.")] = False,
) -> None:
    """What a run said on this machine."""
    file = Home.find().run_folder(name) / driver.LOG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"run {name!r} has no log at {file}: it did not run on this machine under this home")
    with file.open() as lines:
        while True:
            sys.stdout.write(lines.read())
            sys.stdout.flush()
            if not follow or driver.holder_of(file.parent) is None:
                return
            time.sleep(0.5)


@command
def stop(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    grace_s: Annotated[float, typer.Option("--grace-s", help="Seconds to wait for it to end.")] = 60.0,
) -> None:
    """Stop a run that this machine drives. Steps on record stay; the run's command resumes it."""
    holder = driver.holder_of(Home.find().run_folder(name))
    if holder is None:
        raise ProcessLookupError(f"run {name!r}: no process on this machine drives it; nothing to stop")
    if not driver.stop(holder, grace_s):
        raise TimeoutError(
            f"run {name!r}: process {holder.pid} goes on after {grace_s} s; end it with kill -9 {holder.pid}"
        )
    console.print(f"stopped {name} (process {holder.pid}); its `rollbook run` command resumes it")


@command
def sync_tracking(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    traces: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the trajectories to have as traces; the run's own by default."),
    ] = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """Tell MLflow what it missed of a run while it was away. Doing it twice does no harm."""
    opened = open_store(store, store_endpoint)[1]
    from flows.launch import sync_tracking as sync

    console.print(f"MLflow has {name}: {sync(name, opened, traces)}", highlight=False)


@command
def up(
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow pages.")] = 5050,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect pages.")] = 4200,
) -> None:
    """The MLflow and Prefect servers on this machine, until Ctrl-C. Runs started meanwhile use them."""
    from infra.servers import ServerError, serving

    home = Home.find()
    home.prepare()
    with driver.interruptible(), serving(home, mlflow_port, prefect_port) as (servers, ended):
        runs = f"{servers.mlflow_url}/#/experiments/1/runs?workflowType=machine_learning"
        console.print(f"MLflow   {runs}\nPrefect  {servers.prefect_url}\nCtrl-C stops both.", soft_wrap=True)
        while True:
            time.sleep(0.5)
            if (name := ended()) is not None:
                raise ServerError(f"{name} has ended; see its log in {home.root}")


@command
def doctor(
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    ray: Annotated[str, typer.Option(help="'local' or an address.")] = "local",
    as_json: AsJson = False,
) -> None:
    """Try everything that a run needs on this machine."""
    home, opened = open_store(store, store_endpoint)
    from infra.doctor import examine

    checks = examine(home, opened, ray)
    if as_json:
        print(json.dumps({"ok": all(c.ok for c in checks), "checks": [asdict(c) for c in checks]}))
    else:
        views.checks(console, checks)
    if not all(c.ok for c in checks):
        raise typer.Exit(1)


@command
def import_model(
    path: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or an installed package with one.")],
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """Copy a model into the store. Qwen2.5, Qwen3, Qwen3-MoE and Llama families; of .gguf files SmolLM2's kind."""
    Home.find().prepare()
    from flows.launch import import_only

    manifest = import_only(path, ResourcesConfig(store=store, store_endpoint=store_endpoint))
    facts = manifest.facts
    console.print(f"{facts['family']}, {facts['parameters']:,} parameters, context {facts['context']}: {manifest.uri}")
    console.print(f"use it with  --set model.path={path}", highlight=False)


@command
def export_model(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    iteration: Annotated[
        int | None, typer.Option("--iteration", help="After this iteration; by default the last.")
    ] = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """Copy a published policy out of the store, as a Hugging Face folder."""
    home, opened = open_store(store, store_endpoint)
    policy = reading.export(Ledger(opened, name), iteration, folder, home.cache)
    console.print(
        f"policy {policy.policy_version} of {name}, digest {policy.content_digest[:16]}: {folder}", soft_wrap=True
    )


@command
def tag(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    label: Annotated[str, typer.Argument(metavar="TAG")],
    iteration: Annotated[int | None, typer.Option("--iteration", help="Whose state it names.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away.")] = False,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """Name the training state after an iteration, so that it is kept whatever `checkpoint` says."""
    ledger = Ledger(open_store(store, store_endpoint)[1], name)
    if remove == (iteration is not None):
        raise ValueError("give either --iteration K, the iteration to name, or --remove")
    if iteration is None:
        Checkpoints(ledger).untag(label)
        console.print(f"{label} is no tag of {name} any more")
    elif reading.tag(ledger, label, iteration):
        console.print(f"{label}: the state after iteration {iteration} of {name}; it stays")
    else:
        console.print(
            f"{label}: iteration {iteration} of {name}. Its state is no longer kept: training that starts there first "
            "repeats recorded train steps",
            soft_wrap=True,
        )


def main() -> None:
    """The console script."""
    Home.find().set_environment()
    try:
        app()
    except SystemExit as ended:
        driver.leave(ended.code)
        raise


if __name__ == "__main__":
    main()
