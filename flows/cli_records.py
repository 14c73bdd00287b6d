"""Commands that read the record: lineage, differences, checks, queries; and those that clear away."""

import json
import re
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from data.audit import audit
from data.diff import compare_manifests, compare_runs
from data.index import Index, Node
from data.ledger import Ledger, list_runs
from data.lineage import trace
from data.references import resolve
from flows import reading
from flows import record_views as views
from flows.commands import AsJson, Endpoint, Overrides, StoreUrl, command, console, open_store
from flows.config import parse
from infra.home import Home

Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="RUN/ITERATION/STEP, RUN@VERSION, RUN:TRAJECTORY, the beginning of a digest, a URI, or an MLflow run id.",
    ),
]

MLFLOW_ID = re.compile(r"[0-9a-f]{32}")


def _resolve(index: Index, ref: str, home: Home, run: str | None = None) -> Node:
    """A reference to a node; one that is an MLflow run's id is asked for there."""
    if run is None and MLFLOW_ID.fullmatch(ref) and not index.with_digest(ref):
        from infra.mlflow_runs import told_of

        ref = told_of(home.tracking_uri, ref)
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
    config = parse(reading.require_record(ledger).config, overrides)
    from flows.reasons import reasons

    found = reasons(ledger, config, iteration, step)
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
    reading.require_record(ledger)
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
