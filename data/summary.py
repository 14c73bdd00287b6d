"""What the ledger says of a run, iteration by iteration: the figures that `show`, MLflow and the log line share."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from pydantic import JsonValue

from data.ledger import STEPS, THREADS, Ledger
from data.manifest import Manifest

DECODINGS = ("sampled", "greedy")


@dataclass(frozen=True)
class IterationSummary:
    """One iteration. `wall` is None if the driver died between the last step and its note."""

    iteration: int
    manifests: Mapping[str, Manifest]  # by step, those on record
    wall: float | None  # seconds, from the driver's clock

    @property
    def complete(self) -> bool:
        return all(step in self.manifests for step in STEPS)

    @property
    def seconds(self) -> dict[str, float]:
        """Each step's own time inside its process, s."""
        return {step: self.manifests[step].seconds for step in STEPS if step in self.manifests}

    @property
    def orchestration(self) -> float | None:
        """Wall time of the iteration less the steps' own, s."""
        return None if self.wall is None else self.wall - sum(self.seconds.values())

    @property
    def metrics(self) -> dict[str, float]:
        """Everything measured: the steps' metrics, their seconds, and the policy's version."""
        merged: dict[str, float] = {}
        for step in STEPS:
            if step in self.manifests:
                merged |= self.manifests[step].metrics
        merged |= {f"seconds/{step}": seconds for step, seconds in self.seconds.items()}
        if self.wall is not None and self.orchestration is not None:
            merged |= {"seconds/iteration": self.wall, "seconds/orchestration": self.orchestration}
        return merged | self._staleness()

    @property
    def held_out(self) -> dict[str, float]:
        """Mean reward on held-out problems of the policy that the iteration starts from, by decoding."""
        scores = {d: self.manifests.get(f"score_{d}") for d in DECODINGS}
        return {d: manifest.metrics["reward/mean"] for d, manifest in scores.items() if manifest is not None}

    @property
    def mismatch(self) -> dict[str, JsonValue] | None:
        """Engine against trainer, as replay recorded it: `measured`, then `edges` and `counts`, else a `reason`."""
        found = self.manifests["replay"].facts.get("mismatch") if "replay" in self.manifests else None
        return found if isinstance(found, dict) else None

    def _staleness(self) -> dict[str, float]:
        """How many optimizer steps lie between the policy that sampled and the one that was replayed."""
        if "publish" not in self.manifests or "generate" not in self.manifests:
            return {}
        sampled, published = (self.manifests[step].policy_version for step in ("generate", "publish"))
        return {
            "policy_version": float(published),
            "staleness": float(self.manifests["replay"].policy_version - sampled),
        }


@dataclass(frozen=True)
class RunSummary:
    """A run as its ledger has it."""

    run: str
    iterations: tuple[IterationSummary, ...]
    evaluations: Mapping[int, Mapping[str, float]]  # iteration -> decoding -> held-out mean reward

    @property
    def done(self) -> int:
        """The iteration after the last that is complete."""
        return max((s.iteration for s in self.iterations if s.complete), default=-1) + 1

    @property
    def held_out(self) -> dict[str, dict[str, float] | None]:
        """The first evaluation and the last; None where there is none."""
        order = sorted(self.evaluations)
        before = dict(self.evaluations[order[0]]) if order else None
        return {"before": before, "after": dict(self.evaluations[order[-1]]) if len(order) > 1 else None}


def summarize(ledger: Ledger) -> RunSummary:
    """Read every manifest of a run; no table is opened."""
    with ThreadPoolExecutor(THREADS) as pool:
        summaries = list(pool.map(partial(summarize_iteration, ledger), ledger.iterations()))
    evaluations = {summary.iteration: summary.held_out for summary in summaries if summary.held_out}
    trained = tuple(s for s in summaries if any(step in s.manifests for step in STEPS))
    return RunSummary(ledger.run, trained, evaluations)


def summarize_iteration(ledger: Ledger, iteration: int) -> IterationSummary:
    manifests = {manifest.step: manifest for manifest in ledger.steps(iteration)}
    return IterationSummary(iteration, manifests, _read_wall(ledger, iteration))


def note_wall(ledger: Ledger, iteration: int, wall: float) -> None:
    """Keep the driver's wall time of an iteration beside its steps; the first note stays."""
    ledger.store.create(_wall_path(ledger, iteration), json.dumps({"wall": wall}).encode())


def _read_wall(ledger: Ledger, iteration: int) -> float | None:
    try:
        return float(json.loads(ledger.store.read_bytes(_wall_path(ledger, iteration)))["wall"])
    except FileNotFoundError:
        return None


def _wall_path(ledger: Ledger, iteration: int) -> str:
    return f"{ledger.home(iteration).run}/{iteration:06d}/wall.json"
