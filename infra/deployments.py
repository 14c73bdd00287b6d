"""Prefect deployments of one run: made from prefect.yaml, made again when asked again, and taken away."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, DeploymentFilterTags
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.deployment_triggers import DeploymentEventTrigger
from prefect.exceptions import ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from infra.prefect_tasks import prefect_url, require_prefect

FILE = Path(__file__).with_name("prefect.yaml")
VARIABLE = re.compile(r"\{\{ \$(\w+) \}\}")
TAG, REPORT_TAG = "rollbook", "failures"


@dataclass(frozen=True)
class Place:
    """Where the flow runs of a run's deployments work."""

    run: str
    pool: str
    folder: Path  # what relative paths in the config are relative to
    home: Path

    @property
    def variables(self) -> dict[str, str]:
        return {
            "ROLLBOOK_RUN": self.run,
            "ROLLBOOK_POOL": self.pool,
            "ROLLBOOK_FOLDER": str(self.folder),
            "ROLLBOOK_HOME": str(self.home),
        }


@dataclass(frozen=True)
class Made:
    """A deployment as the server has it."""

    name: str  # flow/deployment
    url: str  # of its page
    cron: str | None


def deploy(
    place: Place, parameters: Mapping[str, Mapping[str, Any]], crons: Mapping[str, str], timezone: str
) -> list[Made]:
    """Make or update them; `parameters` and `crons` by the name of the flow's function.

    Raises ConnectionError without a server, ValueError for a cron line or a timezone that is none.
    """
    schedules = {function: _schedule(cron, timezone) for function, cron in crons.items()}
    with _client() as client:
        _have_pool(client, place.pool)
        return [_apply(client, spec, place.pool, parameters, schedules) for spec in _specs(place.variables)]


def remove(run: str) -> list[str]:
    """Take away a run's deployments, and with the last run's the report of failures; the names of those removed."""
    with _client() as client:
        ours = _tagged(client, TAG, run)
        if not ours:
            raise LookupError(f"run {run!r}: no deployment at {client.api_url} is of it; nothing to remove")
        gone = [_delete(client, deployment) for deployment in ours]
        if not _tagged(client, TAG):
            gone += [_delete(client, deployment) for deployment in _tagged(client, REPORT_TAG)]
        return gone


def become_worker(pool: str, limit: int | None) -> NoReturn:
    """Replace this process by Prefect's worker, in the environment that Rollbook's flow runs need."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", ProcessWorker.type]
    command += ["--limit", str(limit)] if limit is not None else []
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {"PATH": path, "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO"}
    os.execve(sys.executable, command, {**os.environ, **own})


def require_server() -> str:
    """The address of the API. Raises ConnectionError if none is set, or it does not answer."""
    url = prefect_url()
    if not url:
        raise ConnectionError(
            "no Prefect server: start one with `rollbook up` in another terminal, or set PREFECT_API_URL"
        )
    require_prefect(url)
    return url


@contextmanager
def _client() -> Iterator[SyncPrefectClient]:
    require_server()
    with get_client(sync_client=True) as client:
        yield client


def _specs(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """prefect.yaml's deployments with the variables filled in."""
    text = VARIABLE.sub(lambda match: json.dumps(variables[match[1]])[1:-1], FILE.read_text())
    return yaml.safe_load(text)["deployments"]


def _have_pool(client: SyncPrefectClient, name: str) -> None:
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=name, type=ProcessWorker.type, base_job_template=template))
        return
    if pool.type != ProcessWorker.type:
        raise ValueError(f"--pool {name!r}: is of type {pool.type!r}; Rollbook's runs need one of type process")


def _apply(
    client: SyncPrefectClient,
    spec: Mapping[str, Any],
    pool: str,
    parameters: Mapping[str, Mapping[str, Any]],
    schedules: Mapping[str, CronSchedule],
) -> Made:
    flow, limit = load_flow_from_entrypoint(spec["entrypoint"]), spec["concurrency_limit"]
    function = spec["entrypoint"].rpartition(".")[2]
    schedule = schedules.get(function)
    made = client.create_deployment(
        flow_id=client.create_flow(flow),
        name=spec["name"],
        entrypoint=spec["entrypoint"],
        description=flow.description,
        tags=spec["tags"],
        parameters={**spec.get("parameters", {}), **parameters.get(function, {})},
        # The server refuses a run with a parameter that the flow does not have.
        parameter_openapi_schema={**flow.parameters.model_dump_for_openapi(), "additionalProperties": False},
        enforce_parameter_schema=True,
        schedules=[DeploymentScheduleCreate(schedule=schedule)] if schedule else [],
        concurrency_limit=limit["limit"],
        concurrency_options=ConcurrencyOptions(collision_strategy=limit["collision_strategy"]),
        work_pool_name=pool,
        job_variables=spec["work_pool"]["job_variables"],
    )
    client.delete_resource_owned_automations(f"prefect.deployment.{made}")
    for trigger in spec.get("triggers", []):
        event = DeploymentEventTrigger.model_validate(trigger)
        event.set_deployment_id(made)
        client.create_automation(event.as_automation())
    page = f"{str(client.api_url).rstrip('/').removesuffix('/api')}/deployments/deployment/{made}"
    return Made(f"{flow.name}/{spec['name']}", page, schedule.cron if schedule else None)


def _schedule(cron: str, timezone: str) -> CronSchedule:
    try:
        return CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"cron {cron!r} in timezone {timezone!r}: {reason}; write five fields, as '0 2 * * *', and a name as "
            "'Europe/Berlin'"
        ) from None


def _tagged(client: SyncPrefectClient, tag: str, name: str | None = None) -> list[DeploymentResponse]:
    named = None if name is None else DeploymentFilterName(any_=[name])
    return client.read_deployments(
        deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[tag]), name=named)
    )


def _delete(client: SyncPrefectClient, deployment: DeploymentResponse) -> str:
    client.delete_resource_owned_automations(f"prefect.deployment.{deployment.id}")
    client.delete_deployment(deployment.id)
    return f"{client.read_flow(deployment.flow_id).name}/{deployment.name}"
