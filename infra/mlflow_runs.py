"""Which recorded run or iteration an MLflow run tells of."""

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient


def told_of(tracking_uri: str, run_id: str) -> str:
    """RUN of a parent run's id, RUN/ITERATION of a nested one's. Raises LookupError for any other."""
    try:
        tags = MlflowClient(tracking_uri).get_run(run_id).data.tags
    except MlflowException as error:
        raise LookupError(
            f"{run_id}: no digest on record begins so, and MLflow at {tracking_uri} has no such run: {error.error_code}"
        ) from None
    if "rollbook.run" not in tags:
        raise LookupError(f"{run_id}: an MLflow run that is not Rollbook's: it has no tag rollbook.run")
    iteration = tags.get("rollbook.iteration")
    return tags["rollbook.run"] if iteration is None else f"{tags['rollbook.run']}/{iteration}"
