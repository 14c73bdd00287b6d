"""Rescoring: another reward function over stored rollouts, and how rewards and advantages would have been."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prefect import flow

from data.ledger import Ledger, read_table
from data.manifest import Manifest
from flows.config import RunConfig
from flows.session import borrowed, open_ledger
from infra.home import Home
from infra.prefect_tasks import as_task
from ops.metrics import advantage_shift, reward_shift
from ops.ragged import from_arrow
from tasks.advantages import estimate_advantages
from tasks.score import score
from tasks.step import Run

STEPS = ("score", "advantages")


@dataclass(frozen=True)
class Rescored:
    """An iteration under another scorer."""

    iteration: int
    metrics: dict[str, float]
    rewards: str  # URI of the new table's manifest
    advantages: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def choose(ledger: Ledger, span: str) -> list[int]:
    """Iterations from "A:B", as Python slices them, of those that have advantages.

    Raises ValueError for what is no span, or an empty one.
    """
    low, colon, high = span.partition(":")
    there = [k for k in ledger.iterations() if any(m.step == "advantages" for m in ledger.steps(k))]
    try:
        first, last = int(low or 0), int(high or max(there, default=0) + 1) if colon else int(low) + 1
    except ValueError:
        raise ValueError(f"--iterations {span!r}: write A:B, or one number") from None
    if last <= first:
        raise ValueError(f"--iterations {span!r}: ends before it begins; write A:B with A < B")
    chosen = [k for k in there if first <= k < last]
    if not chosen:
        raise ValueError(f"--iterations {span!r}: none of {ledger.run!r} is there; it has {there[:1]} to {there[-1:]}")
    return chosen


@flow(name="rescore", flow_run_name="rescore-{config.run}", persist_result=False)
def rescore(config: RunConfig, iterations: list[int]) -> list[Rescored]:
    """config: the recorded one with another `reward`. The new tables lie beside the old, under their keys.

    A trajectory whose scoring fails has no reward, is counted, and leaves its group, as in training.
    """
    home = Home.find()
    with borrowed(config, open_ledger(config, home), home, aside=frozenset(STEPS), steps=STEPS) as run:
        run.get_ready()
        one = partial(_rescore, run, config)
        return [as_task(f"rescore-{k}", lambda iteration: one(iteration), iteration=k) for k in iterations]


def _rescore(run: Run, config: RunConfig, k: int) -> Rescored:
    recorded = {m.step: m for m in run.ledger.steps(k)}
    if lacking := {"generate", "score", "replay", "advantages"} - recorded.keys():
        raise LookupError(f"iteration {k} of {config.run!r}: {', '.join(sorted(lacking))} not on record; leave it out")
    rollouts, replays = recorded["generate"], recorded["replay"]
    rewards = score(run, k, rollouts, config.reward, config.sampling)
    advantages = estimate_advantages(run, k, rollouts, rewards, replays, config.advantage)
    if not isinstance(rewards, Manifest) or not isinstance(advantages, Manifest):
        raise TypeError(f"iteration {k}: a plan has no rewards")
    pairs = (recorded["score"], rewards), (recorded["advantages"], advantages)
    return Rescored(k, _shift(run.ledger, *pairs), rewards.uri, advantages.uri)


def _shift(
    ledger: Ledger, rewards: tuple[Manifest, Manifest], advantages: tuple[Manifest, Manifest]
) -> dict[str, float]:
    before, after = (read_table(ledger.store, m, ["reward"])["reward"].to_numpy() for m in rewards)
    columns = ["token_advantages", "loss_mask"]
    old, new = (read_table(ledger.store, m, columns) for m in advantages)
    mask = from_arrow(old["loss_mask"], "loss_mask").values & from_arrow(new["loss_mask"], "loss_mask").values
    tokens = (from_arrow(table["token_advantages"], "token_advantages").values[mask] for table in (old, new))
    return reward_shift(before, after) | advantage_shift(*tokens)
