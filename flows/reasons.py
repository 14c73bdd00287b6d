"""Why a step of a run would be made again: its recorded key against that of the request which would be made now."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from data.attempt import read_manifest
from data.ledger import STEPS, Address, Ledger, Request
from data.manifest import Manifest
from data.request import KEYED, Difference, differences
from flows.config import RunConfig
from flows.session import make_run
from infra.home import Home
from tasks.evaluate import EVALUATIONS
from tasks.step import Run


@dataclass(frozen=True)
class Change:
    """A recorded step whose request would be another one now."""

    step: str
    iteration: int | None
    fields: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        fields = [{"name": d.name, "recorded": d.recorded, "now": d.asked} for d in self.fields]
        return {"step": self.step, "iteration": self.iteration, "fields": fields}


@dataclass(frozen=True)
class Reasons:
    """What a step would be made again for; nothing if it is on record and neither it nor what it is made of changes."""

    step: str
    iteration: int
    key: str | None  # recorded; None if nothing is
    own: tuple[Difference, ...]
    above: tuple[Change, ...]  # of what it is made of, in order of making

    def as_json(self) -> dict[str, Any]:
        own = Change(self.step, self.iteration, self.own).as_json()
        return {**own, "key": self.key, "above": [change.as_json() for change in self.above]}


@dataclass(frozen=True)
class Inquiry(Ledger):
    """A ledger that answers every request with what is on record in its place, and remembers what was asked."""

    used: dict[str, Manifest] = field(default_factory=dict, compare=False)  # shared, that the run was made of, by step
    asked: dict[str, tuple[Request, Manifest | None]] = field(default_factory=dict, compare=False)  # by URI

    def among(self, iteration: int, request: Request) -> Address:
        """Compared is the first of several."""
        return self.at(iteration, request.step)

    def resolve(self, address: Address, request: Request) -> Manifest | None:
        found = self.used.get(request.step) if address.run is None else self.find(address)
        self.asked[self.store.url_of(address.manifest) if found is None else found.uri] = (request, found)
        return found


def reasons(ledger: Ledger, config: RunConfig, iteration: int, step: str) -> Reasons:
    """Compare; nothing runs. Raises LookupError for a step that no iteration has."""
    if step not in (*STEPS, *EVALUATIONS):
        raise LookupError(f"step {step!r}: an iteration has {', '.join((*STEPS, *EVALUATIONS))}")
    inquiry = Inquiry(ledger.store, ledger.run, used=_shared(ledger))
    _walk(config, replace(_planning(config, inquiry), start=ledger.fork), iteration)
    place = inquiry.store.url_of(ledger.at(iteration, step).manifest)
    if place not in inquiry.asked:
        return _unasked(ledger, iteration, step)
    request, found = inquiry.asked[place]
    changes = (_change(*inquiry.asked[uri]) for uri in _above(inquiry, request, set()))
    key = None if found is None else found.key
    return Reasons(step, iteration, key, _fields(request, found), tuple(change for change in changes if change.fields))


def _planning(config: RunConfig, inquiry: Inquiry) -> Run:
    return replace(make_run(config, inquiry, Home.find()), planning=True, watchers=())


def _walk(config: RunConfig, run: Run, iteration: int) -> None:
    from flows.training import begin, evaluate_policy, one_iteration

    head = begin(config, run)
    for k in run.ledger.walk(range(iteration + 1)):
        if k == iteration:
            evaluate_policy(config, run, k, head)
        head = one_iteration(config, run, k, head)


def _shared(ledger: Ledger) -> dict[str, Manifest]:
    """What the first policy of the run was made of, by step; also itself."""
    found: dict[str, Manifest] = {}
    first = ledger.find(ledger.at(0, STEPS[0]))
    waiting = [] if first is None else [first.input_uris["policy"]]
    while waiting:
        made = read_manifest(ledger.store, ledger.store.path_of(waiting.pop()))
        if made is not None:
            found[made.step] = made
            waiting += made.input_uris.values()
    return found


def _unasked(ledger: Ledger, iteration: int, step: str) -> Reasons:
    """A step that lies before a fork, or after one that is to be made: it has no request."""
    found = ledger.find(ledger.at(iteration, step))
    return Reasons(step, iteration, None if found is None else found.key, (), ())


def _above(inquiry: Inquiry, request: Request, seen: set[str]) -> Iterator[str]:
    """URIs of what a request's inputs were made of, those first that were made first."""
    for uri in request.input_uris.values():
        if uri in inquiry.asked and uri not in seen:
            seen.add(uri)
            yield from _above(inquiry, inquiry.asked[uri][0], seen)
            yield uri


def _change(request: Request, found: Manifest | None) -> Change:
    return Change(request.step, None if found is None else found.iteration, _fields(request, found))


def _fields(request: Request, found: Manifest | None) -> tuple[Difference, ...]:
    if found is None or found.key == request.key:
        return ()
    recorded = found.model_dump(mode="json", include=set(KEYED))
    return tuple(differences(recorded, request.keyed))
