"""MLflow: a sweep or a rescoring beneath the run that it is about, each of its parts a nested run."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from infra.tracking import experiment_id, find_run, points


@dataclass(frozen=True)
class Part:
    """A variant, or an iteration."""

    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    step: int = 0


def record(
    tracking_uri: str,
    artifacts: Path,
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
        _record(tracking_uri, artifacts, run, role, name, parts, files)
    except (MlflowException, OSError) as error:
        return str(error).splitlines()[0]
    return ""


def _record(
    tracking_uri: str,
    artifacts: Path,
    run: str,
    role: str,
    name: str,
    parts: Sequence[Part],
    files: Mapping[str, Callable[[Path], None]],
) -> None:
    client = MlflowClient(tracking_uri)
    experiment = experiment_id(client, artifacts)
    if find_run(client, experiment, run=run, role=role, name=name, complete="true") is not None:
        return
    tags = {"rollbook.run": run, "rollbook.role": role, "rollbook.name": name}
    above = find_run(client, experiment, run=run, role="run")
    made = client.create_run(
        experiment, run_name=name, tags=tags | _below(above.info.run_id if above else None)
    ).info.run_id
    for part in parts:
        own = tags | {"rollbook.role": f"{role}-part"} | _below(made)
        nested = client.create_run(experiment, run_name=part.name, tags=own)
        metrics = points(part.metrics, part.step, nested.info.start_time)
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
