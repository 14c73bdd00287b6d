"""Recorded runs from Python: tables as pyarrow, policies as local folders, each file checked when it is read.

from data.runs import open_run

rollouts = open_run("sort").iteration(37).table("rollouts")
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pydantic import JsonValue

from data.home import cache_folder, home_folder, store_url
from data.ledger import STEPS, Ledger, require_record
from data.manifest import Manifest
from data.store import Store
from data.summary import IterationSummary, summarize_iteration
from data.tables import read_table


@dataclass(frozen=True)
class RecordedIteration:
    """One iteration of a run."""

    ledger: Ledger
    cache: Path
    summary: IterationSummary

    @property
    def metrics(self) -> dict[str, float]:
        """Everything measured, by name, with the seconds of each step."""
        return self.summary.metrics

    @property
    def steps(self) -> list[str]:
        """Those on record, in order of making; evaluations are among them."""
        return list(self.summary.manifests)

    def manifest(self, step: str) -> Manifest:
        """What a step has on record. Raises LookupError, with the steps that are there."""
        if step not in self.summary.manifests:
            raise LookupError(f"{self._name}: step {step!r} is not on record; it has {', '.join(self.steps)}")
        return self.summary.manifests[step]

    def table(self, kind: str, columns: Sequence[str] | None = None, *, step: str | None = None) -> pa.Table:
        """A table by its kind, or some of its columns; `step` picks an evaluation's.

        Raises LookupError if there is none, ManifestError for a file that is missing or altered.
        """
        made = [name for name, m in self.summary.manifests.items() if m.kind == kind and step in (None, name)]
        chosen = next((name for name in made if name in STEPS), made[0] if step and made else None)
        if chosen is None:
            there = [
                f"{m.kind} of {name}" for name, m in self.summary.manifests.items() if any(f.table for f in m.files)
            ]
            of = f" of step {step!r}" if step else ""
            raise LookupError(f"{self._name}: no table {kind!r}{of}; it has {', '.join(there) or 'none'}")
        return read_table(self.ledger.store, self.manifest(chosen), columns)

    def policy(self) -> Path:
        """The policy that was published, as a local Hugging Face folder; leave it as it is."""
        return self.ledger.store.local_copy(self.manifest("publish").files, self.cache)

    @property
    def _name(self) -> str:
        return f"iteration {self.summary.iteration} of {self.ledger.run!r}"


@dataclass(frozen=True)
class RecordedRun:
    """A run on record. It may go on meanwhile: each call looks again."""

    ledger: Ledger
    cache: Path

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """What it was started with."""
        return require_record(self.ledger).config

    @property
    def iterations(self) -> list[int]:
        """Numbers of those that were begun; one more than were trained, if it was evaluated at its end."""
        return self.ledger.iterations()

    def iteration(self, number: int) -> RecordedIteration:
        """Raises LookupError, with what is there."""
        summary = summarize_iteration(self.ledger, number)
        if not summary.manifests:
            there = self.iterations
            known = f"{there[0]} to {there[-1]}" if there else "none"
            raise LookupError(f"iteration {number} of {self.ledger.run!r}: not on record; on record: {known}")
        return RecordedIteration(self.ledger, self.cache, summary)


def open_run(name: str, store: str | None = None, endpoint: str | None = None) -> RecordedRun:
    """A run by name, in a store by URL; by default in that of ROLLBOOK_HOME, or of `.rollbook/` here.

    Raises LookupError, with the nearest name, if it is not on record there.
    """
    home = home_folder()
    opened = Store(store or store_url(home), endpoint)
    ledger = Ledger(opened, name)
    require_record(ledger)
    return RecordedRun(ledger, cache_folder(home))
