"""A sweep: variants of an iteration's later steps over the same stored rollouts. What variants share is made once."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from prefect import flow

from data.ledger import STEPS, Fork, Ledger
from data.manifest import Manifest
from data.summary import Evaluation, leading
from flows.config import ConfigError, RunConfig, changed
from flows.replaying import first_reader
from flows.session import borrowed, open_ledger
from flows.training import Head, head_of, one_iteration
from infra.home import Home
from infra.prefect_tasks import as_task
from tasks.evaluate import EVALUATIONS, evaluate
from tasks.state import keep_for_later
from tasks.step import Run

SHOWN = 6
HELD_OUT = "held_out/"
COMPARED = (
    "held_out/sampled",
    "held_out/greedy",
    "reward/mean",
    "value/explained_variance",
    "kl/k3",
    "loss/policy",
    "loss/value",
    "clip_fraction/high",
    "grad_norm",
    "entropy",
)


@dataclass(frozen=True)
class Variant:
    """One combination of settings, and what came of it."""

    settings: Mapping[str, str]
    metrics: Mapping[str, float]
    manifests: Mapping[str, str]  # step -> URI
    seconds: float  # wall; of steps that another variant made, their reading only

    @property
    def name(self) -> str:
        return _named(self.settings)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _named(settings: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def telling(found: Sequence[Variant]) -> list[str]:
    """Of the metrics that people compare, those in which the variants differ."""
    passing = [f"{HELD_OUT}{name}" for name in leading(*map(_held_out, found)) if name.startswith("pass@")]
    names = [*passing, *COMPARED]
    differing = [name for name in names if len({v.metrics.get(name) for v in found}) > 1]
    return differing[:SHOWN] or ["loss/policy"]


def _held_out(variant: Variant) -> dict[str, float]:
    own = {name: value for name, value in variant.metrics.items() if name.startswith(HELD_OUT)}
    return {name.removeprefix(HELD_OUT): value for name, value in own.items()}


def combinations(grid: Sequence[str]) -> list[dict[str, str]]:
    """["a=1,2", "b=x"] -> [{a: 1, b: x}, {a: 2, b: x}]. Commas inside brackets or quotes do not part values.

    Raises ConfigError for a grid that is none.
    """
    axes = [_axis(text) for text in grid]
    names = [name for name, _ in axes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--grid {twice.pop()}: given twice; write its values as one list, a.b=1,2,3")
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]


def _axis(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise ConfigError(f"--grid {text!r}: it must look like a.b=1,2,3")
    return name.strip(), _split(values)


def _split(values: str) -> list[str]:
    """At commas; pieces that are no TOML alone are joined with the next, as those of a list."""
    found, piece = [], ""
    for part in values.split(","):
        piece = f"{piece},{part}" if piece else part
        if piece.count("[") == piece.count("]") and piece.count('"') % 2 == 0:
            found.append(piece.strip())
            piece = ""
    if piece:
        raise ConfigError(f"--grid …={values!r}: a bracket or quote is not closed")
    return found


def variants(config: RunConfig, grid: Sequence[str]) -> list[tuple[dict[str, str], RunConfig]]:
    """Settings and config of each variant. Raises ConfigError for one that cannot be, before anything is started."""
    made = combinations(grid)
    configs = [changed(config, [f"{k}={v}" for k, v in settings.items()]) for settings in made]
    for name in made[0]:
        if first_reader(name) == "generate":
            raise ConfigError(f"--grid {name}: generate reads it, but a sweep shares stored rollouts; use rerun --set")
    return list(zip(made, configs, strict=True))


@flow(name="sweep", flow_run_name="sweep-{config.run}-{iteration}", persist_result=False)
def sweep(config: RunConfig, iteration: int, grid: list[str], held_out: bool = False) -> list[Variant]:
    """Each variant's steps from the first that reads a setting of the grid to train; with `held_out`, its evaluation.

    config: the recorded one. Results lie in the store under their keys, so the same variant is never made twice.
    """
    asked = variants(config, grid)
    if held_out and config.evaluate.problems == 0:
        raise ConfigError(
            "--evaluate with evaluate.problems = 0 on record: the run has no held-out problems; leave it out"
        )
    home = Home.find()
    first = min(map(first_reader, asked[0][0]), key=STEPS.index)
    start = Fork(run=config.run, iteration=iteration, step=first)
    aside = frozenset(STEPS[STEPS.index(first) :]) | frozenset(EVALUATIONS)
    with borrowed(config, open_ledger(config, home), home, start=start, aside=aside) as run:
        run.only_through("publish" if held_out else "train")
        if held_out:
            run.steps = STEPS  # and so their residents, the engine too
        head = head_of(run.ledger, iteration, config.pipelined)
        if not all(_known(run, own, head, iteration, held_out) for _, own in asked):
            run.get_ready()
            if isinstance(head.state, Manifest):
                keep_for_later(run, head.state)
        return [_variant(run, own, settings, head, iteration, held_out) for settings, own in asked]


def _known(run: Run, config: RunConfig, head: Head, iteration: int, held_out: bool) -> bool:
    """Whether a variant is wholly on record, so that nothing has to be started for it."""
    planned = replace(run, planning=True, watchers=(), notes=[])
    after = one_iteration(config, planned, iteration, head)
    return isinstance(after.state, Manifest) and (not held_out or bool(_accuracy(planned, config, iteration, after)))


def _variant(
    run: Run, config: RunConfig, settings: dict[str, str], head: Head, iteration: int, held_out: bool
) -> Variant:
    def body(variant: str) -> tuple[Head, dict[str, float]]:
        after = one_iteration(config, run, iteration, head)
        return after, _accuracy(run, config, iteration, after) if held_out else {}

    started = time.perf_counter()
    name = _named(settings)
    after, scores = as_task(f"variant {name}", body, variant=name)
    seconds = time.perf_counter() - started
    manifests = _made(run.ledger, after.state)
    metrics = {k: v for m in manifests.values() for k, v in m.metrics.items()}
    return Variant(settings, metrics | scores, {step: m.uri for step, m in manifests.items()}, seconds)


def _accuracy(run: Run, c: RunConfig, iteration: int, after: Head) -> dict[str, float]:
    found = evaluate(run, iteration + 1, after.policy, c.evaluate, c.generation, c.reward)
    return {f"{HELD_OUT}{k}": v for k, v in found.figures.items()} if isinstance(found, Evaluation) else {}


def _made(ledger: Ledger, state: Any) -> dict[str, Manifest]:
    """The steps that led to a trained state, by name, in order."""
    above = {name: ledger.open(state.input_uris[name]) for name in ("replays", "advantages")}
    rewards = ledger.open(above["advantages"].input_uris["rewards"])
    return {"score": rewards, "replay": above["replays"], "advantages": above["advantages"], "train": state}
