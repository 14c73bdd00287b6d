"""MLflow: a sweep or a rescoring beneath the run that it is about, each of its parts a nested run."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from infra.tracking import EXPERIMENT


@dataclass(frozen=True)
class Part:
    """A variant, or an iteration."""

    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    step: int = 0


def record(
    tracking_uri: str,
    run: str,
    role: str,
    name: str,
    parts: Sequence[Part],
    files: Mapping[str, Callable[[Path], None]],
) -> str:
    """Enter it below the run's own MLflow run; what has been entered under that name stays. Returns why not, or "".

    files: names of artifacts, and what writes each.
    """
    try:
        _record(tracking_uri, run, role, name, parts, files)
    except (MlflowException, OSError) as error:
        return str(error).splitlines()[0]
    return ""


def _record(
    tracking_uri: str,
    run: str,
    role: str,
    name: str,
    parts: Sequence[Part],
    files: Mapping[str, Callable[[Path], None]],
) -> None:
    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
    if _find(client, experiment_id, run, role, name) is not None:
        return
    tags = {"rollbook.run": run, "rollbook.role": role, "rollbook.name": name}
    above = _find(client, experiment_id, run, "run", None)
    made = client.create_run(experiment_id, run_name=name, tags=tags | _below(above)).info.run_id
    for part in parts:
        own = tags | {"rollbook.role": f"{role}-part"} | _below(made)
        nested = client.create_run(experiment_id, run_name=part.name, tags=own)
        metrics = [Metric(key, value, nested.info.start_time, part.step) for key, value in part.metrics.items()]
        client.log_batch(nested.info.run_id, metrics, [Param(k, v) for k, v in part.params.items()])
        client.set_terminated(nested.info.run_id)
    with tempfile.TemporaryDirectory() as folder:
        for file, write in files.items():
            write(Path(folder) / file)
            client.log_artifact(made, str(Path(folder) / file))
    client.log_batch(made, tags=[RunTag("rollbook.complete", "true")])
    client.set_terminated(made)


def _below(above: str | None) -> dict[str, str]:
    return {} if above is None else {MLFLOW_PARENT_RUN_ID: above}


def _find(client: MlflowClient, experiment: str, run: str, role: str, name: str | None) -> str | None:
    wanted = {"run": run, "role": role} | ({} if name is None else {"name": name, "complete": "true"})
    query = " AND ".join(f"tags.`rollbook.{key}` = '{value}'" for key, value in wanted.items())
    found = client.search_runs([experiment], query, max_results=1)
    return found[0].info.run_id if found else None
