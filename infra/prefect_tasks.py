"""Prefect: a step as a task run, and the page that a person reads about an iteration."""

import contextlib
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from uuid import UUID

import httpx
from prefect import Task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.home import Home
from infra.ray_session import WorkerLost
from infra.servers import own_prefect

log = logging.getLogger("rollbook")
LOST_WORKER_RETRIES = 2
HEALTH_S = 10.0
FAREWELL_S = 15.0  # for what Prefect has yet to tell its server
Unanswered = httpx.HTTPError  # what Prefect's client raises when its server is gone


def _only_lost_workers(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    lost = state.result(raise_on_failure=False)
    if isinstance(lost, WorkerLost):
        log.warning("%s is tried again: its worker was lost (%s)", task.name, str(lost).splitlines()[0])
    return isinstance(lost, WorkerLost)


def inside_flow() -> bool:
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def as_task[Result](name: str, call: Callable[..., Result], **parameters: Any) -> Result:
    """Run `call(**parameters)` as a Prefect task run; plainly where no flow runs (`flow.fn()`).

    Only a lost worker is tried again. Prefect's own result cache is off: the ledger is the memo.
    """
    if not inside_flow():
        return call(**parameters)
    task = Task(
        fn=call,
        name=name,
        retries=LOST_WORKER_RETRIES,
        retry_condition_fn=_only_lost_workers,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    return task(**parameters)


class Pages:
    """What people read of a flow run in Prefect's UI, sent from one background thread: training does not wait for it.

    A page that Prefect does not take is missing there for ever, with those that waited behind it. Make it inside the
    flow run, and close it there; where no flow runs it does nothing.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pages") if inside_flow() else None
        self._progress: UUID | None = None
        self._lost_at = 0.0  # seconds since the epoch
        self._answers = True

    def show(self, key: str, text: str, description: str) -> None:
        """Attach a page to the current Prefect run. Keys: lower case, digits, dashes."""
        self._later(lambda: create_markdown_artifact(text, key=key, description=description))

    def progress(self, key: str, description: str, share: float) -> None:
        """A progress bar, one for a flow run."""

        def send() -> None:
            if self._progress is None:
                self._progress = create_progress_artifact(100.0 * share, key=key, description=description)
            else:
                update_progress_artifact(self._progress, progress=100.0 * share)

        self._later(send)

    def close(self) -> None:
        """Wait until all is sent, or was given up."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _later(self, send: Callable[[], Any]) -> None:
        if self._thread is not None:
            self._thread.submit(copy_context().run, self._send, send, time.time())

    def _send(self, send: Callable[[], Any], asked_at: float) -> None:
        """Each try at a dead server takes a minute: what was asked for meanwhile is not tried."""
        if asked_at < self._lost_at:
            return
        try:
            send()
        except Exception as error:  # whatever Prefect's server does must not touch the training
            self._lost_at = time.time()
            if self._answers:
                said = next(iter(str(error).splitlines()), "no message")
                log.warning("Prefect: %s: %s. Training goes on; pages are missing there", type(error).__name__, said)
            self._answers = False
        else:
            self._answers = True


def show_table(key: str, rows: list[dict[str, Any]], description: str) -> None:
    """Attach a table to the current flow run; plainly nothing where none runs. Waits until Prefect has it."""
    if inside_flow():
        create_table_artifact(rows, key=key, description=description)


def remembered(key: str, name: str, value: int) -> int:
    """A number that the first attempt at a flow run decides: its retries get the same, whatever they propose.

    Prefect shows it as a table of the flow run. Where no flow runs, it is what is proposed.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return value
    mine = ArtifactFilter(
        key=ArtifactFilterKey(any_=[key]), flow_run_id=ArtifactFilterFlowRunId(any_=[context.flow_run.id])
    )
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=mine)
    if found:
        return int(json.loads(str(found[0].data))[0][name])
    show_table(key, [{name: value}], f"{name} that this flow run, and its retries, go on to")
    return value


def being_cancelled() -> bool:
    """Whether somebody has asked Prefect to cancel the current flow run."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(context.flow_run.id).state
    return state is not None and state.is_cancelling()


def suspended_before() -> str | None:
    """The id of a flow run of the current one's deployment that waits for a person, if it is not the current one."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return None
    siblings = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[context.flow_run.deployment_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED])),
    )
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=siblings)
    return next((str(run.id) for run in found if run.id != context.flow_run.id), None)


@contextlib.contextmanager
def prefect_at_hand(home: Home, meanwhile: Callable[[], object]) -> Iterator[None]:
    """Where flows can run: a Prefect server answers, the one that is set, or else one of our own until the end.

    `meanwhile` is called while that one starts. Raises ConnectionError or ServerError if there is none.
    """
    if url := prefect_url():
        require_prefect(url)
        meanwhile()
        yield
        return
    with own_prefect(home) as server:
        meanwhile()
        server.await_ready()
        with temporary_settings({PREFECT_API_URL: server.url}):
            try:
                yield
            finally:
                if server.lives:  # to a dead one each event would be offered for 7 s
                    EventsWorker.drain_all(timeout=FAREWELL_S, at_exit=False)  # its logs too


def prefect_url() -> str | None:
    """Of the API of the server that is set, by PREFECT_API_URL or Prefect's own profile."""
    return PREFECT_API_URL.value()


def require_prefect(url: str) -> None:
    """Raises ConnectionError if the Prefect server whose API is at `url` does not answer at all."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=HEALTH_S).close()
    except urllib.error.HTTPError:  # it answers; it may want a key, which Prefect's client has
        return
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(
            f"Prefect at {url} does not answer ({reason}); start it with `rollbook up`, or unset PREFECT_API_URL: the "
            "run then starts one for itself"
        ) from None
