"""What a flow holds while it works on one run: ledger, warm residents, MLflow records, lock and log."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from data.ledger import Ledger, changes
from data.store import Store
from data.summary import summarize
from flows.config import RunConfig
from flows.pages import artifact_key
from infra import handover
from infra.claims import Claim
from infra.driver import Holder, driving, require_going_on
from infra.home import Home
from infra.orphans import attend
from infra.prefect_tasks import Pages
from infra.ray_session import Fleet
from tasks.roles import engine_role, trainer_role, worker_role
from tasks.state import finish_copies
from tasks.step import Note, Run

if TYPE_CHECKING:
    from infra.tracking import Tracker

log = logging.getLogger("rollbook")


@dataclass(frozen=True)
class Session:
    config: RunConfig
    run: Run
    tracker: "Tracker"
    pages: Pages
    home: Home

    def show_progress(self, share: float) -> None:
        """On Prefect's page of the flow run."""
        self.pages.progress(f"progress-{artifact_key(self.config.run)}", f"Iterations of {self.config.run}", share)

    def keep_curves(self) -> None:
        """The run's curves, as PNG in its folder and among its MLflow artifacts."""
        from infra.plots import curves_png  # matplotlib is loaded when it is needed

        png = self.home.run_folder(self.config.run) / "curves.png"
        curves_png(png, summarize(self.run.ledger))
        self.tracker.artifact("plots", png)


# Told of each step before it runs; a terminal sets it to show progress.
watchers: list[Callable[[Note], None]] = []
# By run, residents that are loading their libraries already; a launcher sets it while it waits for Prefect.
begun: dict[str, Fleet] = {}


@contextlib.contextmanager
def session(config: RunConfig, patience_s: float = 0.0) -> Iterator[Session]:
    """Hold a run while a flow works on it; one that another process drives is waited for, for `patience_s`.

    Raises StoreError, RunConflict or RunBusy before anything is entered in the store.
    """
    home = Home.find()
    home.prepare()
    ledger = open_ledger(config, home)
    with driving(home.run_folder(config.run), config.run, patience_s), contextlib.ExitStack() as stack:
        ledger.store.check_writable()
        ledger.open_or_create(config)
        attend()
        run = make_run(config, ledger, home)
        stack.callback(handover.sweep)
        stack.callback(run.fleet.close)
        claim = Claim(ledger, Holder.me())
        run.watchers = [*run.watchers, lambda note: None if note.recorded else claim.hold()]
        tracker, pages = open_tracker(config, ledger, home), Pages()
        status = "FAILED"
        try:
            yield Session(config, run, tracker, pages, home)
            finish_copies(run)
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            tracker.close(status)
            pages.close()


@contextlib.contextmanager
def borrowed(config: RunConfig, ledger: Ledger, home: Home, **changes: Any) -> Iterator[Run]:
    """A run's steps and residents for work beside it: nothing is entered under its name, and it may go on meanwhile."""
    attend()
    run = replace(make_run(config, ledger, home), **changes)
    try:
        yield run
    finally:
        run.fleet.close()


def open_ledger(config: RunConfig, home: Home) -> Ledger:
    resources = config.resources
    store = Store(resources.store or home.store_url, resources.store_endpoint, resources.store_patience_s)
    return Ledger(store, config.run)


def open_tracker(config: RunConfig, ledger: Ledger, home: Home) -> "Tracker":
    from infra.tracking import Tracker  # with MLflow, which takes seconds and no plan needs

    params = config.model_dump(mode="json")
    return Tracker(
        home.tracking_uri,
        home.mlflow_artifacts,
        config.run,
        ledger.store.url,
        params,
        _fork_tags(ledger),
        config.tracking.traces,
    )


def _fork_tags(ledger: Ledger) -> dict[str, str] | None:
    record, fork = ledger.record, ledger.fork
    if record is None or fork is None or ledger.parent is None or ledger.parent.record is None:
        return None
    changed = "; ".join(map(str, changes(ledger.parent.record, record)))
    return {
        "rollbook.parent": fork.run,
        "rollbook.fork_iteration": str(fork.iteration),
        "rollbook.fork_step": fork.step,
        "rollbook.changed": changed or "nothing",
    }


def make_run(config: RunConfig, ledger: Ledger, home: Home) -> Run:
    threads = config.resources.threads
    return Run(
        name=config.run,
        seed=config.seed,
        ledger=ledger,
        fleet=begun.pop(config.run, None) or Fleet(config.resources.ray_address),
        cache=home.cache,
        engine=engine_role(config.engine, config.resources, bool(config.sampling.stop)),
        trainer=trainer_role(config.resources, config.layout),
        worker=worker_role(config.reward.workers),
        watchers=[lambda note: require_going_on(), *watchers],
        checkpoint=config.checkpoint,
        hands_over=config.engine.sync == "tensor",
        iterations=config.iterations,
        start=ledger.fork,
        execution={
            "threads": threads,
            "engine": config.engine.model_dump(exclude={"kind"}),
            "micro_tokens": config.train.micro_tokens,
            "recompute": config.train.recompute,
            "layout": config.layout.model_dump(),
            "checkpoint": config.checkpoint.model_dump(),
        },
    )
