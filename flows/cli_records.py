"""Commands that read the record: lineage, differences, checks, queries; and those that clear away."""

import csv
import json
import re
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from data.audit import audit
from data.diff import compare_manifests, compare_runs
from data.index import Index, Node
from data.ledger import Ledger, list_runs, require_record
from data.lineage import trace
from data.prune import clear, clear_copies, forks_of, old_copies, strays, surplus_states, whole_run
from data.references import resolve
from flows import record_views as views
from flows.commands import AsJson, Endpoint, Overrides, StoreUrl, command, console, open_store
from infra import driver
from infra.home import Home

Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="RUN/ITERATION/STEP, RUN@VERSION, RUN:TRAJECTORY, the beginning of a digest, a URI, or an MLflow run id.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would go.")]
MLFLOW_ID = re.compile(r"[0-9a-f]{32}")


def _resolve(index: Index, ref: str, home: Home, run: str | None = None) -> Node:
    """A reference to a node; one that is an MLflow run's id is asked for there."""
    if run is None and MLFLOW_ID.fullmatch(ref) and not index.with_digest(ref):
        from infra.tracking import run_of

        if (told := run_of(home.tracking_uri, ref)) is None:
            raise LookupError(f"{ref}: neither a digest on record nor, in MLflow at {home.tracking_uri}, a run's id")
        ref = "/".join(str(part) for part in told if part is not None)
    return resolve(index, ref, run)


@command
def lineage(
    ref: Ref,
    run: Annotated[str | None, typer.Option("--run", help="Then REF is the id of a trajectory of it.")] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="How far the tree goes.")] = 3,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """What a recorded thing was made of, down to model, prompts, code and seed; and what was made of it."""
    home, opened = open_store(store, store_endpoint)
    index = Index(opened, home.cache)
    traced = trace(index, _resolve(index, ref, home, run))
    if as_json:
        print(json.dumps({"ref": ref, **traced.as_json()}))
    else:
        views.lineage(console, traced, depth)


@command
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run, or a REF as `lineage` takes it.")],
    second: Annotated[str, typer.Argument(metavar="B")],
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """How two recorded things of one kind differ, field by field and column by column; or where two runs part."""
    home, opened = open_store(store, store_endpoint)
    index = Index(opened, home.cache)
    if {first, second} <= {record.run for record in list_runs(opened)}:
        runs = compare_runs(index, Ledger(opened, first), Ledger(opened, second))
        found, render = runs.as_json(), lambda: views.run_difference(console, runs)
    else:
        pair = [index.manifest(_resolve(index, ref, home)) for ref in (first, second)]
        manifests = compare_manifests(opened, *pair)
        found, render = manifests.as_json(), lambda: views.manifest_difference(console, manifests)
    if as_json:
        print(json.dumps(found))
    else:
        render()


@command
def why(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    iteration: Annotated[int, typer.Option("--iteration")],
    step: Annotated[str, typer.Option("--step", help="As `rollbook show RUN --iteration K` calls it.")],
    overrides: Overrides = None,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Which fields of a step's key would make it run again: as it is on record, and as it would be asked for now."""
    ledger = Ledger(open_store(store, store_endpoint)[1], name)
    from flows.reasons import reasons
    from flows.replaying import recorded_config

    found = reasons(ledger, recorded_config(ledger, overrides), iteration, step)
    if as_json:
        print(json.dumps({"run": name, **found.as_json()}))
    else:
        views.reasons(console, found)


@command
def verify(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Hash every file of a run again, of what it was made of too; exit code 1 if one is missing or altered."""
    ledger = Ledger(open_store(store, store_endpoint)[1], name)
    require_record(ledger)
    columns = (TextColumn("hashing"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=as_json) as progress:
        bar = progress.add_task("hashing", total=None)
        found = audit(ledger, lambda done, total: progress.update(bar, completed=done, total=total))
    if as_json:
        print(json.dumps({"run": name, "ok": not found.faults, **asdict(found)}))
    else:
        views.audit(console, name, found)
    if found.faults:
        raise typer.Exit(1)


@command
def prune(
    name: Annotated[
        str | None, typer.Argument(metavar="RUN", help="By default all runs, and this home's cache.")
    ] = None,
    unused_h: Annotated[float, typer.Option("--unused-h", min=0, help="Hours after which a local copy is old.")] = 24.0,
    yes: Yes = False,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Clear away training states beyond the retention, what killed processes left, and old local copies.

    No table, no policy and no record of a step is ever among it. What a living process of this machine works on stays.
    """
    home, opened = open_store(store, store_endpoint)
    runs = [require_record(Ledger(opened, name)).run] if name else [record.run for record in list_runs(opened)]
    busy = driver.holders(home.runs)
    removals = [removal for run in runs if run not in busy for removal in surplus_states(Ledger(opened, run))]
    removals += [found for found in strays(opened, name, time.time()) if found.name.split("/")[0] not in busy]
    before = min([time.time() - 3600 * unused_h, *(holder.started for holder in busy.values())])
    copies = [] if name else old_copies(home.cache, before)
    if as_json:
        gone = [{**asdict(removal), "paths": list(removal.paths)} for removal in removals]
        print(json.dumps({"removed": yes, "removals": gone, "copies": [str(folder) for folder in copies]}))
    else:
        views.removals(console, removals, copies, yes)
        for run in sorted(busy.keys() & runs):
            console.print(f"{run} is being driven: left as it is", highlight=False)
    if yes:
        clear(opened, removals)
        clear_copies(copies, before)


@command
def rm(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    yes: Yes = False,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """Remove a run and all that it made. Refused while a fork refers to it, or a process drives it."""
    home, opened = open_store(store, store_endpoint)
    require_record(Ledger(opened, name))
    if forks := forks_of(opened, name):
        raise ValueError(f"run {name!r}: forks refer to it: {', '.join(forks)}; remove them first")
    if (holder := driver.holder_of(home.run_folder(name))) is not None:
        raise driver.busy(name, holder)
    users = Index(opened, home.cache).made_elsewhere(name)
    removal = whole_run(opened, name)
    views.removals(console, [removal], [], yes)
    if yes:
        with driver.driving(home.run_folder(name), name):
            opened.remove(removal.paths)
    if users:
        console.print(f"{len(users)} results elsewhere are made of it and lose their sources: {users[0].name}, ...")


@command
def query(
    name: Annotated[str, typer.Argument(metavar="RUN")],
    sql: Annotated[str, typer.Argument(metavar="SQL", help="Of rollouts, rewards, replays, advantages and steps.")],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Ask all iterations of a run in SQL; each view has the column `iteration`, `steps` has the metrics as a map."""
    from data.query import ask, connect

    ledger = Ledger(open_store(store, store_endpoint)[1], name)
    require_record(ledger)
    with connect(ledger) as database:
        found = ask(database, sql)
        columns, rows = found.columns, found.fetchall()
    if as_json:
        print(json.dumps({"columns": columns, "rows": [[views.plain_json(value) for value in row] for row in rows]}))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([columns, *([views.cell_text(value) for value in row] for row in rows)])
    else:
        views.rows(console, columns, rows)
