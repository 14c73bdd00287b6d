"""How every step runs: look in the ledger, and only if it is not there, run its body on a resident and commit."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.attempt import Attempt
from data.ledger import Ledger
from data.manifest import Manifest
from data.provenance import code_digest
from data.request import Address, Request
from data.tables import read_table
from data.user_code import UserCode
from infra.prefect_tasks import as_task
from infra.ray_session import Fleet, Role

OTHER_SOURCE = "on record, made by another version of Rollbook's source"


@dataclass(frozen=True)
class Step:
    """What a step is called and makes. `version` goes up when its meaning changes, so that no old result passes."""

    name: str
    version: int
    kind: str


@dataclass(frozen=True)
class Pending:
    """In a plan, the result of a step that is not on record."""

    step: str
    iteration: int | None


@dataclass(frozen=True)
class Note:
    """One line of a plan: a step, and why it would run or not."""

    step: str
    iteration: int | None
    recorded: bool
    reason: str


@dataclass(frozen=True)
class Job:
    """What a step's body is given: small and picklable. Bodies read tables themselves; data never travels so."""

    ledger: Ledger
    address: Address
    request: Request
    cache: Path
    started: float = field(default_factory=time.time)

    @property
    def seed(self) -> int:
        return self.request.seed

    def input(self, name: str) -> Manifest:
        found = self.request.inputs[name]
        if not isinstance(found, Manifest):
            raise TypeError(f"input {name!r} of step {self.request.step!r} has no manifest")
        return found

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """An input's table. Raises if a file of it is missing or altered."""
        return read_table(self.ledger.store, self.input(name), columns)

    def folder(self, name: str) -> Path:
        """A verified local copy of an input's files (a policy, a state)."""
        return self.ledger.store.local_copy(self.input(name).files, self.cache)

    def attempt(self) -> Attempt:
        """Where the result is written; its clock started with the job."""
        attempt = self.ledger.writer(self.address, self.request)
        attempt.started = self.started
        return attempt


@dataclass
class Run:
    """What the steps of one run share."""

    name: str
    seed: int
    ledger: Ledger
    fleet: Fleet
    cache: Path
    engine: Role
    trainer: Role
    worker: Role
    execution: dict[str, Any]
    planning: bool = False
    notes: list[Note] = field(default_factory=list)
    watchers: Sequence[Callable[[Note], None]] = ()  # told of each step before it runs; one that raises ends the run

    def get_ready(self) -> None:
        """Wait until every resident can work, so that no step's time is spent on starting one."""
        for resident in (self.engine, self.trainer, self.worker):
            self.fleet.warm(resident)
        for resident in (self.engine, self.trainer, self.worker):
            self.fleet.await_ready(resident)

    def note(self, note: Note) -> None:
        self.notes.append(note)
        for watcher in self.watchers:
            watcher(note)


def perform(
    run: Run,
    step: Step,
    iteration: int | None,
    inputs: Mapping[str, Manifest | Pending | str],
    config: Mapping[str, Any],
    seed: int,
    role: Role,
    body: Callable[..., Manifest | None],
    args: tuple[Any, ...] = (),
    code: Mapping[str, UserCode] | None = None,
) -> Any:
    """The step's manifest: the recorded one if its key is this step's, else that of `body(resource, job, *args)`.

    The body runs on every rank of a gang; the first one commits and returns the manifest, the others return None.
    `iteration` None: it belongs to no run. In a plan nothing runs, and a step that is not on record gives Pending.
    Raises StepConflict, naming the changed field, if another key is on record there.
    """
    waiting = [name for name, value in inputs.items() if isinstance(value, Pending)]
    if waiting:
        run.note(Note(step.name, iteration, False, f"its input {waiting[0]} is not on record"))
        return Pending(step.name, iteration)
    request = Request(
        step=step.name,
        step_version=step.version,
        kind=step.kind,
        inputs={name: value for name, value in inputs.items() if not isinstance(value, Pending)},
        config=dict(config),
        seed=seed,
        user_code={name: unit.digest for name, unit in (code or {}).items()},
        execution=run.execution,
    )
    address = run.ledger.shared(request) if iteration is None else run.ledger.at(iteration, step.name)
    recorded = run.ledger.resolve(address, request)
    if recorded is not None:
        same = recorded.code_digest == code_digest()
        run.note(Note(step.name, iteration, True, "on record" if same else OTHER_SOURCE))
        return recorded
    run.note(Note(step.name, iteration, False, "not on record"))
    if run.planning:
        return Pending(step.name, iteration)

    def call(key: str, inputs: dict[str, str]) -> Manifest:
        del key, inputs  # for the reader of Prefect's page
        for resident in (run.engine, run.trainer, run.worker):
            run.fleet.warm(resident)  # their libraries load while the first steps run
        return run.fleet.run(role, _body, body, run.ledger, address, request, run.cache, args)

    digests = dict(request.input_digests)
    return as_task(step.name, call, key=request.key, inputs=digests)


def _body(
    resource: Any,
    body: Callable[..., Manifest | None],
    ledger: Ledger,
    address: Address,
    request: Request,
    cache: Path,
    args: tuple[Any, ...],
) -> Manifest | None:
    """In the resident: its clock starts here."""
    return body(resource, Job(ledger, address, request, cache), *args)


def require_same_rows(first: pa.Table, *others: pa.Table) -> None:
    """Raises ValueError unless the tables speak of the same trajectories in the same order."""
    for table in others:
        if not first["trajectory_id"].equals(table["trajectory_id"]):
            raise ValueError(
                "tables of one iteration differ in their trajectory_id columns: they were not made from one rollouts "
                "table; run the steps again from generate"
            )
