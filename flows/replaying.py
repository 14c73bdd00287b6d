"""Repeating what is on record: forks that go another way, and steps made once more to be compared."""

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prefect import flow

from data.columns import VOLATILE
from data.compare import TableDifference, compare_tables
from data.ledger import STEPS, Fork, Ledger, changes, read_table, require_record
from data.manifest import Manifest
from data.summary import summarize
from flows.config import ConfigError, RunConfig, changed, parse
from flows.session import borrowed, open_ledger
from flows.training import head_of, one_iteration
from infra.home import Home
from tasks.state import same_bits, unlike_updates, updates_of
from tasks.step import Run, Verification

# Which step reads a setting first; the longest name that fits counts. What is not here is read before any iteration.
FIRST_READER = {
    "seed": "generate",
    "prompts": "generate",
    "sampling": "generate",
    "engine": "generate",
    "environment": "generate",
    "partial": "generate",
    "pipelined": "generate",
    "reward": "score",
    "replay": "replay",
    "critic": "replay",
    "train.mini_batch": "replay",
    "train.old_logp_source": "replay",
    "advantage": "advantages",
    "train": "train",
    "evaluate": "publish",
}
# How far a step's repetition may be from the record where bits are not demanded: [tokens] log-probs, values, entropies.
NEAR = {"cpu": 1e-4, "cuda": 0.05}


@dataclass(frozen=True)
class Branch:
    """A fork to be: its config, where it leaves its parent, and what it changes."""

    config: RunConfig
    fork: Fork
    changed: tuple[str, ...]

    def create(self, ledger: Ledger) -> None:
        """Enter it. Raises RunConflict if the name is on record as another fork, or with other settings."""
        Ledger(ledger.store, self.config.run).open_or_create(self.config, self.fork)


def recorded_config(ledger: Ledger, overrides: list[str] | None = None) -> RunConfig:
    """What a run was started with, in the store where it was found, with some settings changed.

    Raises LookupError for an unknown run, ConfigError for a setting that cannot be.
    """
    home, record = Home.find(), require_record(ledger)
    config = changed(parse(record.config), overrides or [])
    own = ledger.store.url == home.store_url
    where = {"store": None if own else ledger.store.url, "store_endpoint": None if own else ledger.store.endpoint}
    return config.model_copy(update={"resources": config.resources.model_copy(update=where)})


def branch(
    ledger: Ledger, iteration: int, first: str | None, overrides: list[str], name: str | None = None, more: int = 0
) -> Branch:
    """The fork that leaves a run at a step of an iteration, by default the first that a changed setting touches.

    Raises ConfigError for changes that an earlier step reads, LookupError for an iteration that is not there.
    """
    require_iteration(ledger, iteration)
    if own := [o for o in overrides if o.partition("=")[0].strip() in ("run", "iterations")]:
        raise ConfigError(f"--set {own[0]}: a fork is named with --name, and made longer with --continue N")
    recorded = recorded_config(ledger)
    config = recorded_config(ledger, overrides)
    differing = changes(_as_record(ledger, recorded), _as_record(ledger, config))
    readers = {str(d): first_reader(d.name) for d in differing}
    earliest = min(readers.values(), key=STEPS.index, default=None)
    if first is None and earliest is None and overrides:
        raise ConfigError(
            f"--set {overrides[0]}: no step of an iteration reads it, so there is nothing to make again; "
            f"`rollbook resume {ledger.run} --set {overrides[0]}` goes on with it"
        )
    if first is None and earliest is None:
        raise ConfigError("nothing is changed; give --set a.b=c, or --from STEP to repeat steps as they were")
    first = require_step(first or str(earliest), "--from")
    for change, reader in readers.items():
        if STEPS.index(reader) < STEPS.index(first):
            raise ConfigError(f"{change}: {reader} reads it, which is before --from {first}; use --from {reader}")
    digest = hashlib.sha256(json.dumps(sorted(readers)).encode()).hexdigest()[:6]
    run = name or ".".join([ledger.run, str(iteration), first, *([digest] if readers else [])])
    update = {"run": run, "iterations": iteration + 1 + more}
    return Branch(
        config.model_copy(update=update), Fork(run=ledger.run, iteration=iteration, step=first), tuple(readers)
    )


def longer(ledger: Ledger, more: int, overrides: list[str]) -> RunConfig:
    """The config with which a recorded run goes on for some iterations beyond those that are complete."""
    config = recorded_config(ledger, overrides)
    last = summarize(ledger).done + more
    return config.model_copy(update={"iterations": last if more else max(last, config.iterations)})


def compare_with_parent(ledger: Ledger, iteration: int) -> dict[str, Any]:
    """What a fork's steps of an iteration came to, beside its parent's."""
    assert ledger.parent is not None and ledger.fork is not None
    mine = {m.step: m for m in ledger.steps(iteration)}
    theirs = {m.step: m for m in ledger.parent.steps(iteration)}
    steps = [step for step in STEPS if step in mine and not ledger.fork.has(iteration, step)]
    return {
        "run": ledger.run,
        "parent": ledger.parent.run,
        "iteration": iteration,
        "steps": [_beside(step, mine[step], theirs.get(step)) for step in steps],
    }


def _beside(step: str, mine: Manifest, theirs: Manifest | None) -> dict[str, Any]:
    before = theirs.metrics if theirs else {}
    equal = theirs is not None and theirs.content_digest == mine.content_digest
    moved = {name: [before.get(name), value] for name, value in mine.metrics.items() if before.get(name) != value}
    return {"step": step, "equal": equal, "content_digest": mine.content_digest, "metrics": moved, "uri": mine.uri}


def first_reader(setting: str) -> str:
    """The first step that reads a setting. Raises ConfigError for one that is read before any iteration."""
    fitting = [name for name in FIRST_READER if setting == name or setting.startswith(f"{name}.")]
    if not fitting:
        raise ConfigError(f"{setting}: training begins with it, so no iteration has another; take a new run name")
    return FIRST_READER[max(fitting, key=len)]


def require_iteration(ledger: Ledger, iteration: int) -> None:
    """Raises LookupError, with those that there are, for an iteration that was never begun."""
    require_record(ledger)
    there = [k for k in ledger.iterations() if any(m.step == STEPS[0] for m in ledger.steps(k))]
    if iteration not in there:
        has = f"it has {there[0]} to {there[-1]}" if there else "it has none"
        raise LookupError(f"iteration {iteration} of {ledger.run!r}: not on record; {has}")


def require_order(first: str, through: str) -> None:
    """Raises ConfigError for steps of which the last comes before the first, or that are none."""
    if STEPS.index(require_step(through, "--through")) < STEPS.index(require_step(first, "--from")):
        raise ConfigError(f"--through {through} with --from {first}: it comes before; the order is {', '.join(STEPS)}")


def require_step(step: str, option: str) -> str:
    if step not in STEPS:
        raise ConfigError(f"{option} {step!r}: is no step of an iteration; use one of {', '.join(STEPS)}")
    return step


def _as_record(ledger: Ledger, config: RunConfig) -> Any:
    record = require_record(ledger)
    return record.model_copy(update={"semantic": json.loads(json.dumps(config.semantic()))})


@dataclass(frozen=True)
class StepCheck:
    """A recorded step, and the same made once more."""

    step: str
    recorded: Manifest
    again: Manifest
    table: TableDifference | None  # of a step that makes one
    bits: bool  # whether equal bits are demanded; else what is near will do
    near: float

    @property
    def equal(self) -> bool:
        return self.recorded.content_digest == self.again.content_digest

    @property
    def passed(self) -> bool:
        return self.equal or (not self.bits and self._near())

    def _near(self) -> bool:
        if self.table is not None:
            apart = self.table
            moved = apart.unlike or apart.only_recorded or apart.only_again or apart.reordered
            return not moved and all(c.largest is not None and c.largest <= self.near for c in apart.columns)
        if self.recorded.kind != "state":
            return False  # a policy is its state's weights, copied
        return unlike_updates(updates_of(self.recorded), updates_of(self.again)) is None

    def told(self) -> str:
        """What came out, in words."""
        if self.equal:
            return "equal"
        return f"{'near' if self.passed else 'DIFFERS'}: {_told(self.table)}"

    def as_json(self) -> dict[str, Any]:
        columns = [column.as_json() for column in self.table.columns] if self.table is not None else []
        digests = {"recorded": self.recorded.content_digest, "again": self.again.content_digest}
        return {"step": self.step, "passed": self.passed, "outcome": self.told(), **digests, "columns": columns}


@flow(name="verify-steps", flow_run_name="verify-{config.run}-{iteration}", persist_result=False)
def verify_steps(config: RunConfig, iteration: int, first: str, through: str) -> list[StepCheck]:
    """Make recorded steps once more, each from its recorded inputs, and compare. Nothing of it is kept."""
    home = Home.find()
    with _scratch(config, home, iteration, first, through) as (run, verification):
        one_iteration(config, run, iteration, head_of(run.ledger, iteration, config.pipelined))
        return [_check(run.ledger, recorded, again) for recorded, again in verification.pairs]


@contextlib.contextmanager
def _scratch(
    config: RunConfig, home: Home, iteration: int, first: str, through: str
) -> Iterator[tuple[Run, Verification]]:
    """A run whose recorded steps are made again in a ledger that is then removed."""
    ledger = open_ledger(config, home)
    verification = Verification(Ledger(ledger.store, f"scratch-{uuid.uuid4().hex[:12]}"))
    start = Fork(run=config.run, iteration=iteration, step=first)
    try:
        with borrowed(config, ledger, home, start=start, verification=verification) as run:
            run.only_through(through)
            yield run, verification
    finally:
        for _, again in verification.pairs:
            files = [ledger.store.path_of(entry.uri) for entry in again.files]
            ledger.store.remove([ledger.store.path_of(again.uri), *files])


def _check(ledger: Ledger, recorded: Manifest, again: Manifest) -> StepCheck:
    table = None
    if any(entry.table for entry in recorded.files):
        tables = (read_table(ledger.store, manifest) for manifest in (recorded, again))
        table = compare_tables(*tables, VOLATILE[recorded.kind])
    trained = "device" in again.execution
    bits = same_bits(recorded.execution, again.execution) if trained else recorded.step != "generate"
    near = NEAR[str(again.execution.get("device", "cpu"))]
    return StepCheck(recorded.step, recorded, again, table, bits, near)


def _told(table: TableDifference | None) -> str:
    """The first differing row and column, and how many there are."""
    if table is None:
        return "other weights"
    if not table.columns:
        return f"other rows or columns: {', '.join((*table.unlike, *table.only_recorded, *table.only_again)[:3])}"
    first = table.columns[0]
    apart = "" if first.largest is None else f", by at most {first.largest:.3g}"
    names = ", ".join(column.column for column in table.columns[1:])
    return f"{first.column} in {first.rows} rows, first {first.first}{apart}" + (f"; also {names}" if names else "")
