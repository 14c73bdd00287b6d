"""The flows: `train` a run from its config, or one iteration of it. What is on record is not done again."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from prefect import flow

from data.conversations import of_evaluation, of_iteration
from data.ledger import Ledger
from data.manifest import Manifest
from data.summary import Evaluation, Wall, leading, note_wall, summarize_iteration, with_error
from flows.config import RunConfig
from flows.pages import artifact_key, iteration_files, iteration_line, iteration_page
from flows.pipelining import both, meanwhile
from flows.session import Session, session
from infra.prefect_tasks import as_task
from tasks.advantages import estimate_advantages
from tasks.evaluate import evaluate
from tasks.generate import generate
from tasks.import_model import import_model, require_layout
from tasks.partial import require_resumable
from tasks.publish import hand_over, publish
from tasks.replay import replay
from tasks.score import score
from tasks.step import Pending, Run
from tasks.train import train as train_on
from tasks.warm_start import warm_start

if TYPE_CHECKING:
    from infra.tracking import IterationRecord, Tracker

log = logging.getLogger("rollbook")


@dataclass(frozen=True)
class Head:
    """Where a run stands before an iteration. In a plan, what is not on record is Pending."""

    base: Manifest | Pending  # the policy that training began from
    policy: Manifest | Pending
    state: Manifest | Pending  # of the trainer; before the first iteration the base policy
    sampler: Manifest | Pending  # the policy that the iteration's rollouts are by
    before: Manifest | Pending | None = None  # what the iteration before generated

    @property
    def recorded(self) -> bool:
        return not any(isinstance(part, Pending) for part in (self.base, self.policy, self.state))


@flow(name="train", flow_run_name="train-{config.run}", persist_result=False)
def train(config: RunConfig, through: str | None = None) -> None:
    """PPO, or one of its kin, for `config.iterations` iterations, with held-out evaluations before, between, after.

    A fork begins where it leaves its parent. With `through`, the last iteration ends with that step, and evaluations
    are left out too.
    """
    with session(config) as opened:
        if through is not None:
            opened.run.only_through(through, config.iterations - 1)
        first = opened.run.start.iteration if opened.run.start else 0
        head = begin(config, opened.run)
        held_out(opened, first, head)
        for k in opened.run.ledger.walk(range(first, config.iterations)):
            known = on_record(opened, k, head)
            if known is None and due(config, k, first):
                held_out(opened, k, head)
            head = known or run_iteration(opened, k, head)
            opened.show_progress((k + 1) / config.iterations)
        if config.iterations > first:
            held_out(opened, config.iterations, head)
        opened.keep_curves()


@flow(name="iterate", flow_run_name="iterate-{config.run}-{iteration}", persist_result=False)
def iterate(config: RunConfig, iteration: int) -> None:
    """One iteration of a run. Raises ValueError if one before it is not on record."""
    with session(config) as opened:
        head = begin(config, opened.run)
        for earlier in opened.run.ledger.walk(range(iteration)):
            known = on_record(opened, earlier, head)
            if known is None:
                raise ValueError(
                    f"run {config.run!r}: iteration {earlier} is not on record; run the flow `train` first"
                )
            head = known
        if on_record(opened, iteration, head) is None:
            opened.run.goes_on = False
            run_iteration(opened, iteration, head)


def begin(config: RunConfig, run: Run) -> Head:
    """The policy that training begins from: imported, warm-started if the config says so; of a fork, its parent's.

    Raises ValueError, before anything is done, for what cannot be gone on with.
    """
    require_resumable(config.generation)
    if run.start is not None:
        return head_of(run.ledger, run.start.iteration, config.pipelined)
    require_layout(config.model.path, config.layout)
    imported = import_model(run, config.model.path)
    base = warm_start(run, imported, config.generation, config.warm_start, config.train)
    return Head(base, policy=base, state=base, sampler=base)


def head_of(ledger: Ledger, k: int, pipelined: bool) -> Head:
    """Where a recorded run stood before iteration `k`, by what is on record. Raises LookupError if it never did."""

    def recorded(iteration: int, step: str) -> Manifest:
        found = ledger.find(ledger.at(iteration, step))
        if found is None:
            raise LookupError(f"iteration {k} of {ledger.run!r}: {step} of iteration {iteration} is not on record")
        return found

    if k == 0:
        base = ledger.open(recorded(0, "generate").input_uris["policy"])
        return Head(base, base, base, base)
    policy, state = recorded(k - 1, "publish"), recorded(k - 1, "train")
    base = ledger.open(policy.input_uris["base"])
    sampler = policy
    if pipelined:  # what the iteration before began with
        sampler = recorded(k - 2, "publish") if k > 1 else base
    return Head(base, policy, state, sampler, recorded(k - 1, "generate"))


def one_iteration(c: RunConfig, run: Run, k: int, head: Head) -> Head:
    """The algorithm. Each line is a step: found in the ledger, or run on Ray and entered there."""
    temperature, unit = c.replay_temperature, c.advantage.step_unit
    rollouts = generate(run, k, head.sampler, c.generation, head.before)
    with meanwhile(run, k, next_rollouts(c, run, k, head, rollouts)):
        rewards, replays = both(
            run,
            lambda: score(run, k, rollouts, c.reward, c.sampling),
            lambda: replay(run, k, rollouts, head.state, temperature, c.train, c.critic),
        )
        advantages = estimate_advantages(run, k, rollouts, rewards, replays, c.advantage)
        state = train_on(run, k, head.state, rollouts, replays, advantages, temperature, c.train, c.critic, unit)
        with meanwhile(run, k, handed_rollouts(c, run, k, state, head, rollouts)):
            policy = publish(run, k, state, head.base, c.train, c.critic)
    return Head(head.base, policy, state, head.policy if c.pipelined else policy, rollouts)


def next_rollouts(
    c: RunConfig, run: Run, k: int, head: Head, rollouts: Manifest | Pending
) -> Callable[[], object] | None:
    """What makes the rollouts of iteration k + 1 while iteration k trains; None where nothing is done ahead."""
    if not c.pipelined or not may_go_ahead(c, run, k):
        return None
    return partial(generate, run, k + 1, head.policy, c.generation, rollouts)


def handed_rollouts(
    c: RunConfig, run: Run, k: int, state: Manifest | Pending, head: Head, rollouts: Manifest | Pending
) -> Callable[[], object] | None:
    """What makes the rollouts of iteration k + 1 while the policy of iteration k, handed over in memory, is recorded.

    None where policies are not handed over, or an evaluation comes first.
    """
    if c.pipelined or not may_go_ahead(c, run, k) or due(c, k + 1, 0):
        return None
    started = time.perf_counter()
    promised = hand_over(run, k, state, head.base, c.train, c.critic)
    if promised is None:
        return None
    run.handing_s[k] = time.perf_counter() - started
    return partial(generate, run, k + 1, promised, c.generation, rollouts)


def may_go_ahead(c: RunConfig, run: Run, k: int) -> bool:
    """Whether iteration k + 1 may begin before iteration k has ended."""
    alone = run.planning or run.verification is not None or run.through is not None or not run.goes_on
    return not alone and k + 1 < c.iterations


def due(config: RunConfig, k: int, first: int) -> bool:
    """Whether the policy that starts iteration `k`, neither the first nor the last, is one of those to be evaluated."""
    return k > first and config.evaluate.every is not None and k % config.evaluate.every == 0


def evaluate_policy(c: RunConfig, run: Run, k: int, head: Head) -> Evaluation | Pending | None:
    """Held-out problems under the policy that iteration `k` starts from; none if only a part of one is to be done."""
    return None if run.through else evaluate(run, k, head.policy, c.evaluate, c.generation, c.reward)


def plan(config: RunConfig, run: Run) -> None:
    """Walk the whole run without doing anything; `run.notes` then says which steps would run, and why."""
    planned = replace(run, planning=True, watchers=())
    first = run.start.iteration if run.start else 0
    head = begin(config, planned)
    evaluate_policy(config, planned, first, head)
    for k in run.ledger.walk(range(first, config.iterations)):
        iteration = replace(planned, notes=[])
        after = one_iteration(config, iteration, k, head)
        if not after.recorded and due(config, k, first):
            evaluate_policy(config, planned, k, head)
        planned.notes.extend(iteration.notes)
        head = after
    if config.iterations > first:
        evaluate_policy(config, planned, config.iterations, head)


def on_record(opened: Session, k: int, head: Head) -> Head | None:
    """The head after an iteration that is wholly on record, else None. MLflow is told of it if it lacks it."""
    planned = replace(opened.run, planning=True, watchers=(), notes=[])
    known = one_iteration(opened.config, planned, k, head)
    if not known.recorded:
        return None
    tell_iteration(opened.tracker, opened.run.ledger, k)
    return known


def run_iteration(opened: Session, k: int, head: Head) -> Head:
    """An iteration as a Prefect task run with its steps inside, and what people are told of it."""

    def body(iteration: int) -> Head:
        opened.run.get_ready()
        before = tuple(manifest.step for manifest in opened.run.ledger.steps(iteration))
        started = time.perf_counter()
        after = one_iteration(opened.config, opened.run, iteration, head)
        if after.recorded and not opened.run.shares(iteration):
            run, seconds = opened.run, time.perf_counter() - started
            waited, handing = run.waited_s.get(iteration, 0.0), run.handing_s.get(iteration, 0.0)
            note_wall(run.ledger, iteration, Wall(seconds, waited, before, handing, together=True))
        tell_iteration(opened.tracker, opened.run.ledger, iteration)
        summary = summarize_iteration(opened.run.ledger, iteration)
        log.info(iteration_line(summary))
        key = f"iteration-{artifact_key(opened.config.run)}"
        opened.pages.show(key, iteration_page(summary), iteration_line(summary).strip())
        return after

    return as_task(f"iteration-{k}", body, iteration=k)


def tell_iteration(tracker: "Tracker", ledger: Ledger, k: int) -> None:
    """MLflow is told, behind, of an iteration that it lacks."""

    def make() -> "IterationRecord":
        from infra.tracking import IterationRecord

        summary = summarize_iteration(ledger, k)
        return IterationRecord(
            k,
            summary.manifests,
            summary.metrics,
            iteration_page(summary),
            iteration_files(ledger, summary),
            summary.evaluation,
            of_iteration(ledger, summary) if summary.complete else None,
        )

    tracker.iteration(k, make)


def tell_evaluation(tracker: "Tracker", ledger: Ledger, k: int, found: Evaluation) -> None:
    """MLflow is told, behind, of the figures, and of the answers that it lacks."""
    tracker.evaluation(k, found, lambda: [of_evaluation(ledger, rewards) for rewards in found.rewards.values()])


def held_out(opened: Session, k: int, head: Head) -> None:
    """Evaluate, and tell."""
    found = evaluate_policy(opened.config, opened.run, k, head)
    if isinstance(found, Evaluation):
        figures = found.figures
        told = [f"{name} {with_error(figures, name)}" for name in leading(figures)]
        told += [f"{figures['failed']:.0f} not scored"] * (figures["failed"] > 0)
        log.info("held-out after %d iterations: %s", k, ", ".join(told))
        tell_evaluation(opened.tracker, opened.run.ledger, k, found)
