"""How every step runs: look in the ledger, and only if it is not there, run its body on a resident and commit."""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate

import pyarrow as pa
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

from data.attempt import Attempt
from data.config import CheckpointConfig
from data.ledger import STEPS, Fork, Ledger
from data.manifest import Manifest
from data.memory import KNOBS, OutOfMemory
from data.provenance import code_digest
from data.request import Address, Request
from data.tables import read_table
from data.user_code import UserCode
from infra.ray_session import Fleet, Role

type StepFunction[**Rest] = Callable[Concatenate["Run", int, Rest], "Manifest | Pending"]
PROMISE_S = 3600.0
OTHER_SOURCE = "on record, made by another version of Rollbook's source"


class BrokenPromise(RuntimeError):
    """An input that was to be recorded was not, or otherwise: what was made with it is not recorded."""


@dataclass(frozen=True)
class Step:
    """What a step is called and makes. `version` goes up when its meaning changes, so that no old result passes."""

    name: str
    version: int
    kind: str
    several: bool = False  # an iteration may have more than one, made with other settings


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
    how: dict[str, Any] = field(default_factory=dict)  # this attempt was made; recorded with request.execution

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def iteration(self) -> int:
        """Raises TypeError for a step that belongs to no iteration."""
        if self.address.iteration is None:
            raise TypeError(f"step {self.request.step!r} belongs to no iteration")
        return self.address.iteration

    def input(self, name: str) -> Manifest:
        found = self.request.inputs[name]
        if not isinstance(found, Manifest):
            raise TypeError(f"input {name!r} of step {self.request.step!r} has no manifest")
        return found

    def recorded(self, name: str) -> Manifest:
        """An input that may only have been promised (tasks.publish.hand_over), once it is on record.

        Raises BrokenPromise if something else is recorded there, or nothing for PROMISE_S.
        """
        promised = self.input(name)
        if promised.files:
            return promised
        store = self.ledger.store
        patience = Retrying(
            retry=retry_if_result(lambda there: not there),
            wait=wait_exponential(0.02, max=1.0),
            stop=stop_after_delay(PROMISE_S),
            retry_error_callback=lambda state: False,
        )
        if not patience(store.exists, store.path_of(promised.uri)):
            raise BrokenPromise(f"{promised.uri}: not on record after {PROMISE_S:.0f} s; the same command goes on")
        found = self.ledger.open(promised.uri)
        if found.content_digest != promised.content_digest:
            raise BrokenPromise(
                f"{promised.uri}: has digest {found.content_digest[:16]}, this {self.request.step} was made with "
                f"{promised.content_digest[:16]} (its trainer was lost meanwhile); the same command makes it again"
            )
        return found

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """An input's table. Raises if a file of it is missing or altered."""
        return read_table(self.ledger.store, self.input(name), columns)

    def folder(self, name: str) -> Path:
        """A verified local copy of an input's files."""
        return self.folder_of(self.input(name))

    def folder_of(self, manifest: Manifest) -> Path:
        """A verified local copy of the files of a policy or a kept state."""
        return self.ledger.store.local_copy(manifest.files, self.cache)

    def load[Loaded](self, policy: Manifest, load: Callable[[Path], Loaded]) -> Loaded:
        """`load(folder)` of a policy, which hashes its tensors itself and raises ValueError for other ones.

        The files of weights are therefore not hashed before: of 1.2 GB that takes a second. After an error they are,
        which raises ManifestError for one that was altered.
        """
        folder = self.ledger.store.local_copy(policy.files, self.cache, unhashed=".safetensors")
        try:
            return load(folder)
        except ValueError:
            self.folder_of(policy)
            raise

    def attempt(self) -> Attempt:
        """Where the result is written; its clock started with the job."""
        request = replace(self.request, execution={**self.request.execution, **self.how})
        attempt = self.ledger.writer(self.address, request)
        attempt.started = self.started
        return attempt


@dataclass
class Verification:
    """Recorded steps are made once more, in a ledger that is thrown away; later steps still see what is on record."""

    scratch: Ledger
    pairs: list[tuple[Manifest, Manifest]] = field(default_factory=list)  # recorded, made again

    def note(self, recorded: Manifest, again: Manifest) -> Manifest:
        self.pairs.append((recorded, again))
        return recorded


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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    iterations: int = 0  # how many the run is to have
    hands_over: bool = False  # policies go from the trainer to the engine in memory, where both are on one machine
    start: Fork | None = None  # what lies before is taken as it is on record, whatever made it
    through: str | None = None  # the last step that may run
    through_of: int | None = None  # in this iteration; None: in all
    aside: frozenset[str] = frozenset()  # steps whose results belong to no iteration: they lie under their keys
    verification: "Verification | None" = None
    goes_on: bool = True  # from one iteration to the next; else nothing is done ahead
    steps: Sequence[str] = STEPS  # that may have to run; only their residents are made
    planning: bool = False
    waited_s: dict[int, float] = field(default_factory=dict)  # by iteration: at its end, for the next one's rollouts
    handing_s: dict[int, float] = field(default_factory=dict)  # by iteration: for its policy's way into memory
    notes: list[Note] = field(default_factory=list)
    watchers: Sequence[Callable[[Note], None]] = ()  # told of each step before it runs; one that raises ends the run
    _telling: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def only_through(self, step: str, iteration: int | None = None) -> None:
        """Leave out the steps after this one, of one iteration or of all.

        Of a fork's first iteration, only those after the fork will run.
        """
        self.through, self.through_of = step, iteration
        if iteration not in (None, self.start.iteration if self.start is not None else 0):
            return  # whole iterations come before it
        first = STEPS.index(self.start.step) if self.start is not None else 0
        self.steps = STEPS[first : STEPS.index(step) + 1]

    def shares(self, iteration: int) -> bool:
        """Whether steps of the iteration are another run's, so that its wall time is of some steps only."""
        return self.start is not None and self.start.has(iteration, STEPS[0])

    def keeps_state(self, iteration: int) -> bool:
        """Whether the training state after this iteration is written."""
        due = (iteration + 1) % self.checkpoint.every == 0 or iteration + 1 == self.iterations
        return due and "train" not in self.aside and self.verification is None

    def given(self, step: str, iteration: int) -> "Manifest | Pending | None":
        """What a step's result is without asking what it would be made of; None if that has to be asked.

        Raises LookupError if the step lies before the start and is not on record.
        """
        if self.start is not None and self.start.has(iteration, step):
            found = self.ledger.find(self.ledger.at(iteration, step))
            if found is None:
                raise LookupError(
                    f"{step} of iteration {iteration} of {self.start.run!r}: not on record, so nothing can start after "
                    f"it; start with --from {step}, or at an iteration that is complete"
                )
            return found
        if self.through is not None and self.through_of in (None, iteration):
            return Pending(step, iteration) if STEPS.index(step) > STEPS.index(self.through) else None
        return None

    def get_ready(self) -> None:
        """Wait until every resident can work, so that no step's time is spent on starting one."""
        self.warm()
        for resident in self.residents():
            self.fleet.await_ready(resident)

    def warm(self) -> None:
        """Have the residents started, so that their libraries load while the first steps run."""
        for resident in self.residents():
            self.fleet.warm(resident)

    def residents(self) -> list[Role]:
        """Those that the steps need."""
        parts = {"generate": self.engine, "score": self.worker, "advantages": self.worker}
        needed = [parts.get(step, self.trainer) for step in self.steps]
        return [role for role in (self.engine, self.trainer, self.worker) if role in needed]

    def note(self, note: Note) -> None:
        with self._telling:  # steps may run beside each other
            self.notes.append(note)
            for watcher in self.watchers:
                watcher(note)


def unless_given[**Rest](step: Step) -> Callable[[StepFunction[Rest]], StepFunction[Rest]]:
    """Decorates the function of a step: it is asked only for what `run.given` does not know."""

    def decorate(function: StepFunction[Rest]) -> StepFunction[Rest]:
        @functools.wraps(function)
        def call(run: Run, iteration: int, *args: Rest.args, **kwargs: Rest.kwargs) -> Manifest | Pending:
            return run.given(step.name, iteration) or function(run, iteration, *args, **kwargs)

        return call

    return decorate


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
    Raises StepConflict, naming the changed field, if another key is on record there; of a step that an iteration may
    have several of, each key has its own place.
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
    address = _address(run, step, iteration, request)
    recorded = run.ledger.resolve(address, request)
    checked = run.verification if iteration is not None else None
    if recorded is None and checked is not None:
        raise LookupError(
            f"{step.name} of iteration {iteration} of {run.name!r}: not on record; there is nothing to verify"
        )
    if recorded is not None and checked is None:
        same = recorded.code_digest == code_digest()
        run.note(Note(step.name, iteration, True, "on record" if same else OTHER_SOURCE))
        return recorded
    run.note(Note(step.name, iteration, False, "not on record" if checked is None else "to be verified"))
    if run.planning:
        return Pending(step.name, iteration)
    if checked is not None:
        address = checked.scratch.at(iteration, step.name)

    def call(key: str, inputs: dict[str, str]) -> Manifest:
        del key, inputs  # for the reader of Prefect's page
        run.warm()
        return run.fleet.run(role, _body, body, run.ledger, address, request, run.cache, args)

    from infra.prefect_tasks import as_task  # for the driver alone: residents import this module too

    digests = dict(request.input_digests)
    made = as_task(step.name, call, key=request.key, inputs=digests)
    return made if checked is None else checked.note(recorded, made)


def _address(run: Run, step: Step, iteration: int | None, request: Request) -> Address:
    if iteration is None or step.name in run.aside:
        return run.ledger.shared(request)
    return run.ledger.among(iteration, request) if step.several else run.ledger.at(iteration, step.name)


def _body(
    resource: Any,
    body: Callable[..., Manifest | None],
    ledger: Ledger,
    address: Address,
    request: Request,
    cache: Path,
    args: tuple[Any, ...],
) -> Manifest | None:
    """In the resident: its clock starts here. Raises OutOfMemory, with what makes room, for a GPU that is too small."""
    try:
        return body(resource, Job(ledger, address, request, cache), *args)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        raise OutOfMemory(f"{request.step}: {str(error).splitlines()[0][:200]}; {KNOBS}") from error


def require_same_rows(first: pa.Table, *others: pa.Table) -> None:
    """Raises ValueError unless the tables speak of the same trajectories in the same order."""
    for table in others:
        if not first["trajectory_id"].equals(table["trajectory_id"]):
            raise ValueError(
                "tables of one iteration differ in their trajectory_id columns: they were not made from one rollouts "
                "table; run the steps again from generate"
            )
