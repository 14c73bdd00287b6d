"""`rollbook deploy` and `rollbook worker`: a run as Prefect deployments, and the process that works on them."""

from pathlib import Path
from typing import Annotated

import typer

from flows import views
from flows.commands import Endpoint, Overrides, StoreUrl, command, console, open_store
from flows.config import load
from infra.home import Home

Pool = Annotated[str, typer.Option("--pool", help="Prefect work pool, of type process.")]
POOL = "rollbook"


@command
def deploy(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_CONFIG", help="A run on record, or the TOML of a new one.")],
    cron: Annotated[str | None, typer.Option("--cron", help="When to train, as '0 2 * * *'; else when asked.")] = None,
    more: Annotated[int, typer.Option("--more", min=1, metavar="N", help="Iterations to add each time.")] = 1,
    evaluate_cron: Annotated[str | None, typer.Option("--evaluate-cron", help="When to evaluate.")] = None,
    prune_cron: Annotated[str | None, typer.Option("--prune-cron", help="When to prune.")] = None,
    timezone: Annotated[str, typer.Option("--timezone", help="Of the crons.")] = "UTC",
    approve: Annotated[
        bool, typer.Option("--approve", help="A person must agree before a policy is published.")
    ] = False,
    overrides: Overrides = None,
    pool: Pool = POOL,
    remove: Annotated[bool, typer.Option("--remove", help="Take the run's deployments away.")] = False,
    store: StoreUrl = None,
    store_endpoint: Endpoint = None,
) -> None:
    """A run as Prefect deployments: train, evaluate, rescore and prune, by schedule or by a click.

    Doing it again updates them. Relative paths in the run's config are those of the folder in which this is called.
    """
    home, _ = open_store(store, store_endpoint)
    from flows import deploying
    from infra import deployments

    api = deployments.require_server()
    if remove:
        run = load(target, overrides).run if target.endswith(".toml") else target
        for name in deployments.remove(run):
            console.print(f"removed {name}", highlight=False)
        return
    subject = deploying.subject(target, overrides or [], store, store_endpoint)
    subject.check(more)
    run = subject.config.run
    wanted = {"continue_training": cron, "evaluate_run": evaluate_cron, "prune_run": prune_cron}
    crons = {function: line for function, line in wanted.items() if line is not None}
    place = deployments.Place(run, pool, Path.cwd(), home.root)
    made = deployments.deploy(place, subject.parameters(more, approve), crons, timezone)
    views.deployments(console, run, made, timezone, api, f"rollbook worker{'' if pool == POOL else f' --pool {pool}'}")


@command
def worker(
    pool: Pool = POOL,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Most flow runs at once.")] = None,
) -> None:
    """The process that works on deployed runs, on this machine, until Ctrl-C. Needs a Prefect server."""
    Home.find().prepare()
    from infra import deployments

    deployments.require_server()
    deployments.become_worker(pool, limit)
