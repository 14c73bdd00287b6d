"""What the ledger says of a run, iteration by iteration: the figures that `show`, MLflow and the log line share."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial

from pydantic import JsonValue

from data.ledger import STEPS, THREADS, Ledger
from data.manifest import Manifest

DECODINGS = ("sampled", "greedy")
ERROR = "/se"  # ends the name of a figure's standard error


@dataclass(frozen=True)
class Evaluation:
    """What one policy got on held-out problems."""

    rewards: Mapping[str, Manifest]  # by decoding

    @property
    def figures(self) -> dict[str, float]:
        """Mean reward by decoding, avg@k and pass@j of the sampled answers, each with its error; and how many failed.

        What `sampled` names is avg@k whatever k, so that evaluations with another k can be told side by side.
        """
        found: dict[str, float] = {}
        for decoding, manifest in self.rewards.items():
            metrics = manifest.metrics
            average = next((n for n in metrics if n.startswith("avg@") and not n.endswith(ERROR)), "reward/mean")
            pairs = {decoding: average, f"{decoding}{ERROR}": f"{average}{ERROR}"}
            found |= {name: metrics[own] for name, own in pairs.items() if own in metrics}
            if decoding == "sampled":
                found |= {name: value for name, value in metrics.items() if name.startswith(("avg@", "pass@"))}
        return found | {"failed": sum(manifest.metrics.get("reward/failed", 0.0) for manifest in self.rewards.values())}


def leading(*figures: Mapping[str, float]) -> list[str]:
    """The names that people look at first: mean rewards, and of each evaluation the pass@k of its largest k above 1."""
    names = {name for found in figures for name in found}
    largest = {max(map(_tries, found), default=0) for found in figures}
    passing = [f"pass@{tries}" for tries in sorted(largest) if tries > 1]
    return [name for name in (DECODINGS[0], *passing, DECODINGS[1]) if name in names]


def _tries(name: str) -> int:
    """pass@8 -> 8; 0 for a figure of another kind."""
    return int(name.removeprefix("pass@")) if name.startswith("pass@") and not name.endswith(ERROR) else 0


def with_error(figures: Mapping[str, float], name: str) -> str:
    """A figure with its standard error, as far as they are known."""
    if name not in figures:
        return "-"
    error = figures.get(f"{name}{ERROR}")
    return f"{figures[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


@dataclass(frozen=True)
class Wall:
    """An iteration by the driver's clock."""

    seconds: float
    waited: float = 0.0  # of these, at the end, for rollouts of the next iteration (pipelined)
    before: tuple[str, ...] = ()  # steps that were on record when it began: rollouts made ahead, a resumed iteration's
    handing: float = 0.0  # of these, for the policy's way into memory, before it was recorded
    together: bool = False  # score and replay ran at the same time


@dataclass(frozen=True)
class IterationSummary:
    """One iteration. `timing` is None if the driver died between the last step and its note."""

    iteration: int
    manifests: Mapping[str, Manifest]  # by step, those on record; of several the newest
    timing: Wall | None

    @property
    def complete(self) -> bool:
        return all(step in self.manifests for step in STEPS)

    @property
    def seconds(self) -> dict[str, float]:
        """Each step's own time inside its process, s."""
        return {step: self.manifests[step].seconds for step in STEPS if step in self.manifests}

    @property
    def orchestration(self) -> float | None:
        """Wall time of the iteration less that of its steps, its waiting and the handing over, s."""
        timing, seconds = self.timing, self.seconds
        if timing is None:
            return None
        inside = {step: s for step, s in seconds.items() if step not in timing.before}
        twice = min(inside.get("score", 0.0), inside.get("replay", 0.0)) if timing.together else 0.0
        return timing.seconds - (sum(inside.values()) - twice) - timing.waited - timing.handing

    @property
    def metrics(self) -> dict[str, float]:
        """Everything measured: the steps' metrics, their seconds, and the policy's version."""
        merged: dict[str, float] = {}
        for step in STEPS:
            if step in self.manifests:
                merged |= self.manifests[step].metrics
        merged |= {f"seconds/{step}": seconds for step, seconds in self.seconds.items()}
        if self.timing is not None and self.orchestration is not None:
            merged |= {"seconds/iteration": self.timing.seconds, "seconds/orchestration": self.orchestration}
            merged |= {"seconds/waited": self.timing.waited} if self.timing.waited else {}
            merged |= {"seconds/handing": self.timing.handing} if self.timing.handing else {}
        return merged | self._staleness()

    @property
    def evaluation(self) -> Evaluation | None:
        """Of the policy that the iteration starts from; of several the newest."""
        scores = {d: self.manifests[f"score_{d}"] for d in DECODINGS if f"score_{d}" in self.manifests}
        return Evaluation(scores) if scores else None

    @property
    def mismatch(self) -> dict[str, JsonValue] | None:
        """Engine against trainer, as replay recorded it: `measured`, then `edges` and `counts`, else a `reason`."""
        found = self.manifests["replay"].facts.get("mismatch") if "replay" in self.manifests else None
        return found if isinstance(found, dict) else None

    @property
    def gap_refused(self) -> str | None:
        """Why the engine's log-probs may not be compared with the trainer's; None if they may."""
        seen = self.mismatch
        if seen is None:
            return "nothing of it is on record"
        return None if seen["measured"] else str(seen["reason"])

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
    evaluations: Mapping[int, Evaluation]  # by the iteration that starts from the policy

    @property
    def done(self) -> int:
        """The iteration after the last that is complete."""
        return max((s.iteration for s in self.iterations if s.complete), default=-1) + 1

    @property
    def held_out(self) -> dict[str, dict[str, float] | None]:
        """Figures of the first evaluation and the last; None where there is none."""
        order = sorted(self.evaluations)
        before = self.evaluations[order[0]].figures if order else None
        return {"before": before, "after": self.evaluations[order[-1]].figures if len(order) > 1 else None}


def summarize(ledger: Ledger) -> RunSummary:
    """Read every manifest of a run; no table is opened."""
    with ThreadPoolExecutor(THREADS) as pool:
        summaries = list(pool.map(partial(summarize_iteration, ledger), ledger.iterations()))
    evaluations = {s.iteration: s.evaluation for s in summaries if s.evaluation is not None}
    trained = tuple(s for s in summaries if any(step in s.manifests for step in STEPS))
    return RunSummary(ledger.run, trained, evaluations)


def summarize_iteration(ledger: Ledger, iteration: int) -> IterationSummary:
    manifests = {manifest.step: manifest for manifest in ledger.steps(iteration)}
    return IterationSummary(iteration, manifests, _read_wall(ledger, iteration))


def note_wall(ledger: Ledger, iteration: int, wall: Wall) -> None:
    """Keep the driver's time of an iteration beside its steps; the first note stays."""
    told = {"wall": wall.seconds} | {f.name: getattr(wall, f.name) for f in fields(Wall) if f.name != "seconds"}
    ledger.store.create(_wall_path(ledger, iteration), json.dumps(told).encode())


def _read_wall(ledger: Ledger, iteration: int) -> Wall | None:
    try:
        told = json.loads(ledger.store.read_bytes(_wall_path(ledger, iteration)))
    except FileNotFoundError:
        return None
    if told.get("ahead"):  # how it was noted once
        told["before"] = ["generate"]
    return Wall(told["wall"], **{f.name: told[f.name] for f in fields(Wall) if f.name in told})


def _wall_path(ledger: Ledger, iteration: int) -> str:
    return f"{ledger.home(iteration).run}/{iteration:06d}/wall.json"
