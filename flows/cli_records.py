"""Commands that read the record: lineage, differences, checks, queries; and those that clear away."""

import json
import re
from typing import Annotated

import typer

from data.index import Index, Node
from data.lineage import trace
from data.references import resolve
from data.store import Store
from flows import record_views as views
from flows.commands import AsJson, Endpoint, StoreUrl, command, console, open_store
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
