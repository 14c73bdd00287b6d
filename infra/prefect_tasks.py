"""Prefect: a step as a task run, and the page that a person reads about an iteration."""

import logging
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext, TaskRunContext

from infra.ray_session import WorkerLost

log = logging.getLogger("rollbook")
LOST_WORKER_RETRIES = 2


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


def show_markdown(key: str, text: str, description: str) -> None:
    """Attach a page to the current Prefect run; nothing where no flow runs. Keys: lower case, digits, dashes."""
    if inside_flow():
        create_markdown_artifact(text, key=key, description=description)


class ProgressPage:
    """A progress bar in Prefect's UI, one for a flow run."""

    def __init__(self, key: str, description: str) -> None:
        self._id: UUID | None = None
        if inside_flow():
            self._id = create_progress_artifact(0.0, key=key, description=description)

    def update(self, share: float) -> None:
        if self._id is not None:
            update_progress_artifact(self._id, progress=100.0 * share)
