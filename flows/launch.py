"""From a checked config to a finished run, in a terminal."""

import contextlib
import importlib
import logging
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data.addresses import without_password
from data.config import ModelConfig, ResourcesConfig
from data.ledger import Ledger, require_record
from data.manifest import Manifest
from data.store import Store
from data.summary import summarize
from flows import reading, views
from flows import session as sessions
from flows.config import RunConfig, changed, parse
from flows.session import borrowed, make_run, open_ledger, open_tracker
from infra.driver import busy, holder_of, interruptible, log_to_terminal, spare_farewells
from infra.home import Home
from infra.orphans import attend
from infra.ray_session import WorkerLost
from tasks.import_model import import_model
from tasks.step import OTHER_SOURCE, Note, Run

log = logging.getLogger("rollbook")
IMPORT_RUN = "import"  # names a fleet, never a folder in the store


def plan(config: RunConfig, through: str | None = None) -> list[Note]:
    """Which steps are on record and which would run, in order, up to `through` of the last. Nothing is written.

    Raises RunConflict or StepConflict if the run is on record with other settings.
    """
    return _planned(config, through).notes


def _planned(config: RunConfig, through: str | None) -> Run:
    """The run, with the notes of its plan."""
    from flows import training

    home = Home.find()
    ledger = open_ledger(config, home)
    if ledger.store.exists(f"{config.run}/run.json"):
        ledger.open_or_create(config)
    run = make_run(config, ledger, home)
    if through is not None:
        run.only_through(through, config.iterations - 1)
    training.plan(config, run)
    return run


def launch(config: RunConfig, console: Console, through: str | None = None) -> None:
    """Run what is not on record, up to the step `through`, showing progress; then say what came out."""
    started = time.perf_counter()
    log_to_terminal(console)
    _require_free(config)
    run = _planned(config, through)
    waiting = [note for note in run.notes if not note.recorded]
    if old := sum(note.reason == OTHER_SOURCE for note in run.notes):
        console.print(
            f"{old} steps on record were made by another version of Rollbook's source. They are not made again: "
            "after a change that matters, take a new name with --set run=NAME",
            style="yellow",
            soft_wrap=True,
        )
    if waiting:
        open_ledger(config, Home.find()).store.check_writable()
        console.print(
            f"{config.run}: {_first(waiting[0])}. Starting Prefect, Ray and the models takes half a minute.",
            soft_wrap=True,
        )
        with _Terminal(config, console), at_hand(run):
            _train(config, through)
    else:
        from flows import training

        console.print(f"{config.run}: every step is on record; nothing to run.")
        training.train.fn(config, through)
    if through is not None:
        return
    ledger = open_ledger(config, Home.find())
    views.result(console, summarize(ledger), time.perf_counter() - started, _place(config.resources))


def sync_tracking(name: str, store: Store, traces: float | None = None) -> str:
    """Tell MLflow what the ledger has and it lacks; what it then has, in words.

    traces: share of the trajectories that it is to have as traces, by default what the config on record says.

    Raises LookupError for an unknown run, ConnectionError if MLflow does not take it.
    """
    from flows import training

    ledger = Ledger(store, name)
    summary = reading.require_run(ledger)
    config = parse(require_record(ledger).config)
    if traces is not None:
        config = changed(config, [f"tracking.traces={traces}"])
    tracker = open_tracker(config, ledger, Home.find())
    done = [iteration for iteration in summary.iterations if iteration.complete]
    for iteration in done:
        training.tell_iteration(tracker, ledger, iteration.iteration)
    for k, evaluation in summary.evaluations.items():
        training.tell_evaluation(tracker, ledger, k, evaluation)
    if lost := tracker.close("FINISHED"):
        address = without_password(Home.find().tracking_uri)
        raise ConnectionError(f"MLflow at {address}: {lost}; the same command tries again")
    sent = tracker.sent
    return f"{len(done)} iterations, {sent.sent:,} of {sent.sent + sent.left_out:,} trajectories as traces"


def import_only(path: str, resources: ResourcesConfig) -> Manifest:
    """Import a model outside of any run."""
    config = RunConfig(run=IMPORT_RUN, model=ModelConfig(path=path), resources=resources)
    home = Home.find()
    with borrowed(config, open_ledger(config, home), home) as run:
        return import_model(run, path)


@contextlib.contextmanager
def at_hand(run: Run | None = None) -> Iterator[None]:
    """Where flows can run: what outlives this process watches it, and a Prefect server answers.

    The residents of `run` and this process load their libraries meanwhile, for the session that the flow opens. Not on
    a Ray of others: until the session holds the run, nobody could see or stop what waits for a place there.
    """
    from infra.prefect_tasks import prefect_at_hand

    attend()
    with interruptible(), contextlib.ExitStack() as stack:
        if run is not None:
            stack.callback(run.fleet.close)
            sessions.begun[run.name] = run.fleet
            stack.callback(sessions.begun.clear)

        def load() -> None:
            if run is not None and run.fleet.local:
                with contextlib.suppress(WorkerLost):  # the first step makes them again
                    run.warm()
            importlib.import_module("infra.tracking")  # MLflow

        stack.enter_context(prefect_at_hand(Home.find(), load))
        yield


def _train(config: RunConfig, through: str | None) -> None:
    """The flow. If Prefect goes away, what matters is whether all is on record."""
    from flows import training
    from infra.prefect_tasks import Unanswered

    try:
        training.train(config, through)
    except Unanswered as error:
        spare_farewells()
        reason = f"Prefect does not answer any more ({type(error).__name__}: {' '.join(str(error).split())})"
        if not all(note.recorded for note in plan(config, through)):
            raise ConnectionError(f"{reason}; the same command goes on from what is on record") from error
        log.warning("%s: it was not told that the run has ended. All is on record", reason)


def _require_free(config: RunConfig) -> None:
    """Raises RunBusy if a living process drives the run: sooner than its lock would tell."""
    holder = holder_of(Home.find().run_folder(config.run))
    if holder is not None:
        raise busy(config.run, holder)


def _place(resources: ResourcesConfig) -> str:
    options = {"--store": resources.store, "--store-endpoint": resources.store_endpoint}
    return "".join(f" {name} {value}" for name, value in options.items() if value is not None)


def _first(note: Note) -> str:
    where = "" if note.iteration is None else f" of iteration {note.iteration}"
    return f"going on with {note.step}{where}" if note.iteration else f"beginning with {note.step}{where}"


class _Terminal:
    """A progress bar over iterations that names the step at work. Log lines scroll above it."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._bar = self._progress.add_task("starting", total=config.iterations)

    def __enter__(self) -> None:
        sessions.watchers.append(self._watch)
        self._progress.start()

    def __exit__(self, *exc: object) -> None:
        sessions.watchers.remove(self._watch)
        self._progress.stop()

    def _watch(self, note: Note) -> None:
        self._progress.update(self._bar, description=note.step, completed=note.iteration or 0)
