"""What Prefect's deployments of a run do: continue it, evaluate, rescore or prune it; and the report of a failure.

Parameters are plain values, so that Prefect's form asks for them. `infra/prefect.yaml` says how each is deployed.
"""

import functools
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import State, flow
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.states import Cancelled
from pydantic import Field

from data.checkpoints import Checkpoints
from data.ledger import Ledger
from data.prune import clear, strays, surplus_states
from data.store import Store
from data.summary import summarize
from flows import replaying, rescoring, training
from flows.config import RunConfig, load
from flows.pages import artifact_key
from flows.session import open_ledger, session
from infra.home import Home
from infra.prefect_tasks import being_cancelled, remembered, show_table, suspended_before

log = logging.getLogger("rollbook")
APPROVAL_S = 7 * 24 * 3600
FAILURES = "failures.log"

Iterations = Annotated[int, Field(ge=1)]
Hours = Annotated[float, Field(ge=0.0)]


class Approval(RunInput):
    """What somebody says of a trained policy: whether it may be published."""

    publish: bool
    why: str = ""


class NotApproved(RuntimeError):
    """Somebody has looked at a trained policy and said no."""


def cancellable[**P](function: Callable[P, State[Any] | None]) -> Callable[P, State[Any] | None]:
    """A worker cancels by SIGTERM, which a session takes for a wish to stop: the flow run is then Cancelled."""

    @functools.wraps(function)
    def ended(*args: P.args, **kwargs: P.kwargs) -> State[Any] | None:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            if being_cancelled():
                return Cancelled(message="stopped; all that is on record stays, and the next run goes on from there")
            raise

    return ended


@flow(flow_run_name="continue-{run}", persist_result=False)
@cancellable
def continue_training(
    run: str,
    more: Iterations = 1,
    config: str | None = None,
    overrides: list[str] | None = None,
    store: str | None = None,
    store_endpoint: str | None = None,
    approve: bool = False,
) -> State[Any] | None:
    """Train a run for some iterations beyond those it has. A retry goes on to the same end.

    Args:
        run: Name of the run.
        more: Iterations to add.
        config: Path of a TOML file that begins the run; unset, the run is on record and goes on with its own config.
        overrides: Changes to the config, each a.b=value. Of a run on record only what changes no result.
        store: fsspec URL of the store; unset, the home's own.
        store_endpoint: Of an S3 service other than AWS.
        approve: Wait for a person before the last of the policies is published.
    """
    started = _config(run, config, overrides, store, store_endpoint)
    ledger = open_ledger(started, Home.find())
    done = summarize(ledger).done
    if approve and _trained(ledger, done):
        if other := suspended_before():
            return Cancelled(message=f"iteration {done} of {run} waits for approval in flow run {other}")
        more = 1  # the policy that somebody is still to be asked about
    goal = remembered(f"goal-{artifact_key(run)}", "iterations", done + more)
    going = started.model_copy(update={"iterations": goal})
    if approve:
        _ask(going, ledger, goal - 1)
    training.train.fn(going)
    return None


@flow(flow_run_name="evaluate-{run}", persist_result=False)
@cancellable
def evaluate_run(
    run: str, store: str | None = None, store_endpoint: str | None = None, patience_h: Hours = 12.0
) -> None:
    """Held-out accuracy of the newest policy of a run, on record like every evaluation.

    Args:
        run: Name of the run.
        store: fsspec URL of the store; unset, the home's own.
        store_endpoint: Of an S3 service other than AWS.
        patience_h: Hours to wait while the run is being trained.
    """
    config = replaying.recorded_config(_ledger(run, store, store_endpoint))
    with session(config, patience_h * 3600) as opened:
        done = summarize(opened.run.ledger).done
        training.held_out(opened, done, training.head_of(opened.run.ledger, done, opened.config.pipelined))
        found = summarize(opened.run.ledger).evaluations.get(done)
    figures = found.figures if found else {}
    show_table(f"held-out-{artifact_key(run)}", [{"iterations": done, **figures}], f"Held-out accuracy of {run}")


@flow(flow_run_name="rescore-{run}", persist_result=False)
@cancellable
def rescore_run(
    run: str,
    scorer: str,
    iterations: str = ":",
    overrides: list[str] | None = None,
    store: str | None = None,
    store_endpoint: str | None = None,
) -> None:
    """Another reward function over stored rollouts: how rewards and advantages would have been.

    Args:
        run: Name of the run.
        scorer: exact, number, integer, math, environment, judge, or path/to/file.py:function.
        iterations: A:B, from A up to, not with, B.
        overrides: Further changes to the config, each a.b=value.
        store: fsspec URL of the store; unset, the home's own.
        store_endpoint: Of an S3 service other than AWS.
    """
    ledger = _ledger(run, store, store_endpoint)
    config = replaying.recorded_config(ledger, [*(overrides or []), f"reward.scorer={scorer}"])
    found = rescoring.rescore.fn(config, rescoring.choose(ledger, iterations))
    rows: list[dict[str, Any]] = [{"iteration": r.iteration, **r.metrics} for r in found]
    show_table(f"rescore-{artifact_key(run)}", rows, f"{run} under {scorer}")


@flow(flow_run_name="prune-{run}", persist_result=False)
@cancellable
def prune_run(run: str, store: str | None = None, store_endpoint: str | None = None, patience_h: Hours = 12.0) -> None:
    """Remove training states beyond the run's retention, and what killed processes left. Tables and policies stay.

    Args:
        run: Name of the run.
        store: fsspec URL of the store; unset, the home's own.
        store_endpoint: Of an S3 service other than AWS.
        patience_h: Hours to wait while the run is being trained.
    """
    config = replaying.recorded_config(_ledger(run, store, store_endpoint))
    with session(config, patience_h * 3600) as opened:
        ledger = opened.run.ledger
        gone = [*surplus_states(ledger), *strays(ledger.store, run, time.time())]
        clear(ledger.store, gone)
        kept = Checkpoints(ledger).live()
    log.info("%s: removed: %s; states kept: %s", run, ", ".join(r.name for r in gone) or "nothing", kept)


@flow(flow_run_name="report-{flow_run}", persist_result=False)
def report_failure(flow_run: str, flow_run_id: str, state: str, message: str) -> None:
    """Told by an automation that a flow run has failed: a page called `failures`, and a line in failures.log.

    Args:
        flow_run: Name of the flow run.
        flow_run_id: Its id.
        state: How it ended.
        message: And why.
    """
    said = " ".join(message.split())
    line = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {flow_run} {state}: {said} (flow run {flow_run_id})"
    with (Home.find().root / FAILURES).open("a") as file:
        file.write(f"{line}\n")
    show_table("failures", [{"flow run": flow_run, "state": state, "why": said, "id": flow_run_id}], line)


def _config(
    run: str, path: str | None, overrides: list[str] | None, store: str | None, endpoint: str | None
) -> RunConfig:
    """Raises ConfigError, LookupError for a run that is not on record, ValueError for a file of another run."""
    if path is None:
        return replaying.recorded_config(_ledger(run, store, endpoint), overrides)
    config = load(path, [*(overrides or []), f"run={run}"])
    if store is None:
        return config
    where = config.resources.model_copy(update={"store": store, "store_endpoint": endpoint})
    return config.model_copy(update={"resources": where})


def _ledger(run: str, store: str | None, endpoint: str | None) -> Ledger:
    return Ledger(Store(store or Home.find().store_url, endpoint), run)


def _trained(ledger: Ledger, k: int) -> bool:
    return ledger.find(ledger.at(k, "train")) is not None


def _ask(config: RunConfig, ledger: Ledger, last: int) -> None:
    """Train all but the last publication, let everything go, and wait. Raises NotApproved for a no."""
    if ledger.find(ledger.at(last, "publish")) is not None:
        return
    if not _trained(ledger, last):
        training.train.fn(config, "train")
    said = suspend_flow_run(wait_for_input=Approval, timeout=APPROVAL_S, key=f"publish-{last}")
    if not said.publish:
        raise NotApproved(f"iteration {last} of {config.run!r} is not to be published: {said.why or 'no reason given'}")
