"""The ledger: which steps of a run are on record, and where. A step is entered once; its key sums up what made it."""

import difflib
import json
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import batched

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from data.attempt import Attempt, read_manifest
from data.columns import SCHEMA_VERSION
from data.manifest import Manifest, ManifestError
from data.request import Address, Difference, Request, StepConflict, conflict, differences
from data.sections import Section
from data.store import Store
from data.tables import read_table

__all__ = [
    "STEPS",
    "Address",
    "Attempt",
    "Fork",
    "Ledger",
    "Request",
    "RunConflict",
    "RunRecord",
    "StepConflict",
    "list_runs",
    "read_table",
    "require_record",
]

SHARED = "shared"
STEPS = ("generate", "score", "replay", "advantages", "train", "publish")  # of an iteration, in order
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ITERATION = re.compile(r"[0-9]{6,}")
AT_ONCE, THREADS = 64, 16  # iterations read ahead, and how many of them at a time
FREE = frozenset({"run", "iterations", "evaluate"})  # a run may be made longer or shorter, and evaluated otherwise
KEY_CHARACTERS = 12


class RunConflict(ValueError):
    """A run name is on record with other settings; the message names each field, both values and the fix."""


class Fork(BaseModel):
    """Where a run leaves another: its entries before that step of that iteration are the other's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    iteration: int
    step: str

    def has(self, iteration: int, step: str) -> bool:
        """Whether an entry is the parent's."""
        before = step in STEPS and STEPS.index(step) < STEPS.index(self.step)
        return iteration < self.iteration or (iteration == self.iteration and before)


class RunRecord(BaseModel):
    """What a run was started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    schema_version: int
    created_at: datetime  # UTC
    config: dict[str, JsonValue]  # all of it
    semantic: dict[str, JsonValue]  # what changes the result
    fork: Fork | None = None


@dataclass(frozen=True)
class Ledger:
    """The entries of one run in one store. Raises ValueError for a name that cannot be a folder."""

    store: Store
    run: str
    _ahead: dict[str, Manifest] = field(default_factory=dict, compare=False, repr=False)  # read, not yet asked for

    def __getstate__(self) -> dict[str, object]:
        return {"store": self.store, "run": self.run, "_ahead": {}}

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run) or self.run == SHARED:
            raise ValueError(
                f"run name {self.run!r}: use 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or "
                f"digit, and not {SHARED!r}; set another with --set run=NAME"
            )

    @property
    def fork(self) -> Fork | None:
        """Where this run leaves another; None of one that stands alone, or is not on record."""
        return None if self.record is None else self.record.fork

    @cached_property
    def record(self) -> RunRecord | None:
        """What the run was started with, as it was when first asked for."""
        return _record(self.store, self.run)

    @cached_property
    def parent(self) -> "Ledger | None":
        """The ledger that has the entries before the fork."""
        return None if self.fork is None else Ledger(self.store, self.fork.run)

    def open_or_create(self, config: Section, fork: Fork | None = None) -> RunRecord:
        """The run's record, made now if there is none.

        Raises RunConflict if it was made with other semantic settings (but for those that are FREE), StoreError
        if the store cannot be written.
        """
        path = f"{self.run}/run.json"
        wanted = RunRecord(
            run=self.run,
            schema_version=SCHEMA_VERSION,
            created_at=datetime.now(UTC),
            config=config.model_dump(mode="json"),
            semantic=json.loads(json.dumps(config.semantic())),
            fork=fork,
        )
        self.__dict__.pop("record", None)
        self.__dict__.pop("parent", None)
        if self.store.create(path, wanted.model_dump_json(indent=1).encode()):
            return wanted
        found = _record(self.store, self.run)
        if found is None:
            raise ManifestError(f"{self.store.url_of(path)}: vanished; nothing may delete from a store in use")
        differing = changes(found, wanted)
        if fork is not None and found.fork != fork:
            raise RunConflict(
                f"run {self.run!r} is on record as {_shown(found.fork)}, not {_shown(fork)}; take a new name"
            )
        if differing:
            raise RunConflict(
                f"run {self.run!r} is on record with other settings: {'; '.join(map(str, differing))}. Pick a new name "
                f"with --set run=NAME, or go back to the recorded value{'s' if len(differing) > 1 else ''}"
            )
        return found

    def at(self, iteration: int, step: str) -> Address:
        """Where a step of an iteration is entered; of what lies before a fork, in the parent."""
        if self.parent is not None and self.fork is not None and self.fork.has(iteration, step):
            return self.parent.at(iteration, step)
        return Address(f"{self.run}/{iteration:06d}/{step}", self.run, iteration)

    def among(self, iteration: int, request: Request) -> Address:
        """Where one of several results of a step is entered: in its place, or beside it if another request's is there.

        So the first has the place of a step that is made once, and all are found by their keys.
        """
        place = self.at(iteration, request.step)
        found = self.find(place)
        if found is None or found.key == request.key:
            return place
        return replace(place, path=f"{place.path}-{request.key[:KEY_CHARACTERS]}")

    def shared(self, request: Request) -> Address:
        """Where a thing that belongs to no run is entered: under its kind and key."""
        return Address(f"{SHARED}/{request.kind}/{request.key}", None, None)

    def find(self, address: Address) -> Manifest | None:
        """What is on record at an address."""
        return self._ahead.pop(address.manifest, None) or read_manifest(self.store, address.manifest)

    def walk(self, iterations: Iterable[int]) -> Iterator[int]:
        """The same numbers, one by one. Where a read takes a round trip, many manifests are read ahead at once."""
        for chunk in batched(iterations, AT_ONCE):
            if not self.store.local and (chunk[0] == 0 or self.places(chunk[0] - 1)):
                with ThreadPoolExecutor(THREADS) as pool:
                    for found in pool.map(self.steps, chunk):
                        self._ahead.update({self.store.path_of(manifest.uri): manifest for manifest in found})
            yield from chunk
        self._ahead.clear()

    def open(self, uri: str) -> Manifest:
        """The manifest at a URI that another one names. Raises ManifestError if it is missing."""
        found = read_manifest(self.store, self.store.path_of(uri))
        if found is None:
            raise ManifestError(f"{uri}: missing, but a later step was made from it; restore the file")
        return found

    def resolve(self, address: Address, request: Request) -> Manifest | None:
        """The recorded result of a request; None if it has to be made.

        Raises StepConflict if another request was recorded there, naming the first field that differs.
        """
        found = self.find(address)
        if found is not None and found.key != request.key:
            raise conflict(found, request)
        return found

    def writer(self, address: Address, request: Request) -> Attempt:
        """A fresh place to make the result of a request. Nothing is on record before its commit."""
        return Attempt(self.store, address, request, uuid.uuid4().hex)

    def iterations(self) -> list[int]:
        """Iterations that were begun, in order; those before a fork are among them."""
        own = {int(name) for name in self.store.list_dirs(self.run) if ITERATION.fullmatch(name)}
        if self.parent is not None and self.fork is not None:
            own |= {k for k in self.parent.iterations() if k <= self.fork.iteration and self.places(k)}
        return sorted(own)

    def places(self, iteration: int) -> list[Address]:
        """Where steps of an iteration were begun; of those before a fork, in the parent."""
        theirs = self.parent.places(iteration) if self.parent is not None else []
        theirs = [place for place in theirs if self.fork and self.fork.has(iteration, place.path.rpartition("/")[2])]
        folder = f"{self.run}/{iteration:06d}"
        own = [Address(f"{folder}/{step}", self.run, iteration) for step in self.store.list_dirs(folder)]
        return [*theirs, *own]

    def steps(self, iteration: int) -> list[Manifest]:
        """What is on record of an iteration, in order of making."""
        found = (read_manifest(self.store, place.manifest) for place in self.places(iteration))
        return sorted((m for m in found if m is not None), key=lambda m: m.created_at)

    def home(self, iteration: int) -> "Ledger":
        """The ledger of the run that an iteration was begun in."""
        before = self.fork is not None and iteration < self.fork.iteration
        return self.parent.home(iteration) if before and self.parent is not None else self


def changes(one: RunRecord, other: RunRecord) -> list[Difference]:
    """Settings that change the result of training and differ between two runs, but for name and length."""
    found = differences(one.semantic, other.semantic)
    return [d for d in found if d.name.split(".")[0] not in FREE]


def list_runs(store: Store) -> list[RunRecord]:
    """Every run of a store, newest first."""
    records = [_record(store, name) for name in store.list_dirs() if name != SHARED]
    return sorted((r for r in records if r is not None), key=lambda r: r.created_at, reverse=True)


def require_record(ledger: Ledger) -> RunRecord:
    """What a run was started with. Raises LookupError, with the nearest name, if nothing of it is on record."""
    if ledger.record is not None:
        return ledger.record
    near = difflib.get_close_matches(ledger.run, [record.run for record in list_runs(ledger.store)], 1)
    hint = f"; did you mean {near[0]!r}?" if near else "; `rollbook ls` lists what is there"
    raise LookupError(f"run {ledger.run!r}: not on record in {ledger.store.url}{hint}")


def _shown(fork: Fork | None) -> str:
    return f"a fork of {fork.run!r} at {fork.step} of iteration {fork.iteration}" if fork else "a run of its own"


def _record(store: Store, run: str) -> RunRecord | None:
    path = f"{run}/run.json"
    try:
        return RunRecord.model_validate_json(store.read_bytes(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ManifestError(
            f"{store.url_of(path)}: not a run record of this version of Rollbook ({error.errors()[0]['msg'].lower()}); "
            "it was altered or is from another version: restore it, or use another store"
        ) from None
