"""MLflow: a projection of the ledger that people browse. Losing it loses nothing; it is filled again from manifests.

A training is a parent run, an iteration a nested run. Each nested run has the metrics, every table as a dataset input
(URI and digest), the manifests, a preview, a report and plots; each published policy is a version in the model
registry. A share of the trajectories are traces, those of an iteration linked to its run, those of an evaluation to the
training's.
"""

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from data.conversations import Scored
from data.manifest import Manifest
from data.summary import Evaluation
from infra.traces import NONE_SENT, Place, Sent, TraceSender

log = logging.getLogger("rollbook")
EXPERIMENT = "rollbook"
DIGEST_CHARACTERS = 36  # what MLflow allows
PARAMS_A_BATCH = 100  # likewise
MLFLOW_RUN_ID = re.compile(r"[0-9a-f]{32}")
MLFLOW, TRACES = "MLflow", "MLflow traces"  # what is sent, as warnings call it
SENT_TAG = "rollbook.traces"  # how many trajectories were sent; begins its name
KEY_CHARACTERS = 8  # of a step's key, in such a name
TABLE_KINDS = ("rollouts", "rewards", "replays", "advantages")


@dataclass(frozen=True)
class IterationRecord:
    """What MLflow is told of one iteration."""

    iteration: int
    manifests: Mapping[str, Manifest]  # by step
    metrics: Mapping[str, float]
    preview: str  # Markdown
    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)  # path of an artifact -> what makes it
    held_out: Evaluation | None = None  # of the policy that the iteration starts from
    tables: Scored | None = None  # its trajectories; None while a part of the iteration is missing


class Tracker:
    """Writes to MLflow from one background thread, so that training does not wait for it."""

    def __init__(
        self,
        tracking_uri: str,
        artifacts: Path,
        run: str,
        store_url: str,
        params: Mapping[str, Any],
        fork: Mapping[str, str] | None = None,
        traces: float = 0.0,
    ) -> None:
        """fork: tags that say where the run leaves another (`rollbook.parent`, its name, among them).

        traces: share of the trajectories that become traces.
        """
        self._thread = ThreadPoolExecutor(1, "mlflow")
        self._client: MlflowClient  # made in the thread: a database that is new takes seconds to lay out
        self._model = run  # its name in the registry
        self._over_http = tracking_uri.startswith("http")
        self._lost: dict[str, str] = {}  # MLFLOW or TRACES: why nothing more of it is sent
        self._run, self._store_url, self._artifacts = run, store_url, artifacts
        self._params, self._fork = dict(params), dict(fork or {})
        self._experiment, self._parent_id = "", ""
        self._recorded: dict[int, str] = {}  # MLflow's run of each iteration
        self._share, self._stop = traces, Event()
        self._sent: dict[tuple[str, str], Sent] = {}  # by MLflow's run and its tag
        self._sender: TraceSender
        self._later(self._open, tracking_uri)

    def iteration(self, iteration: int, make: Callable[[], IterationRecord]) -> None:
        """Tell of an iteration that MLflow lacks, or its traces; only then, and behind, its record is made."""
        record = cache(make)
        self._later(lambda: None if iteration in self._recorded else self._iteration(record()))
        self._later(lambda: self._trace_iteration(iteration, record), what=TRACES)

    def evaluation(self, iteration: int, found: Evaluation, tables: Callable[[], Iterable[Scored]]) -> None:
        """Held-out figures of the policy that iteration `iteration` starts from, on the parent run.

        tables: the answers and their rewards, asked for only if MLflow may lack some.
        """
        self._later(lambda: self._client.log_batch(self._parent_id, _held_out(found, iteration)))
        self._later(lambda: self._trace_evaluation(iteration, tables), what=TRACES)

    def artifact(self, folder: str, file: Path) -> None:
        """A local file among the parent run's artifacts."""
        self._later(lambda: self._client.log_artifact(self._parent_id, str(file), artifact_path=folder))

    def close(self, status: str) -> str:
        """Wait until all is written, or was given up; returns why, empty if all is well.

        status: FINISHED, FAILED or KILLED, as MLflow names the end of a run. A run that was KILLED does not wait for
        its traces: whoever tells MLflow next sends them.
        """
        if status == "KILLED":
            self._stop.set()
        self._later(lambda: self._client.set_terminated(self._parent_id, status))
        self._thread.shutdown(wait=True)
        sent = self.sent
        if sent.left_out > 0 and not self._lost:
            log.info(
                "MLflow has %s of %s trajectories as traces; `rollbook sync-tracking %s --traces 1` sends all",
                *(f"{sent.sent:,}", f"{sent.sent + sent.left_out:,}", self._run),
            )
        return next(iter(self._lost.values()), "")

    @property
    def sent(self) -> Sent:
        """What MLflow has of the run's trajectories, as far as it was told; for after the close."""
        return sum(self._sent.values(), start=NONE_SENT)

    def _later(self, call: Callable[..., Any], *args: Any, what: str = MLFLOW) -> None:
        self._thread.submit(self._send, what, call, *args)

    def _send(self, what: str, call: Callable[..., Any], *args: Any) -> None:
        """After the first failure nothing more is tried: each try may take a minute, and all is in the ledger.

        Traces that MLflow does not take stop no metrics.
        """
        if self._lost.keys() & {what, MLFLOW}:
            return
        try:
            call(*args)
        except Exception as error:  # whatever a tracking server does must not touch the training
            self._lost[what] = _brief(error)
            log.warning(
                "%s: %s. Training goes on; `rollbook sync-tracking %s` tells MLflow later",
                what,
                self._lost[what],
                self._run,
            )

    def _open(self, tracking_uri: str) -> None:
        self._client = MlflowClient(tracking_uri)
        self._sender = TraceSender(self._client)
        self._experiment = experiment = experiment_id(self._client, self._artifacts)
        parent = find_run(self._client, experiment, run=self._run, role="run")
        if parent is None:
            tags = {"rollbook.run": self._run, "rollbook.role": "run", "rollbook.store": self._store_url, **self._fork}
            above = (
                find_run(self._client, experiment, run=self._fork["rollbook.parent"], role="run")
                if self._fork
                else None
            )
            if above is not None:
                tags[MLFLOW_PARENT_RUN_ID] = above.info.run_id
            parent = self._client.create_run(experiment, run_name=self._run, tags=tags)
            params = [Param(k, str(v)) for k, v in flatten(self._params).items()]
            for start in range(0, len(params), PARAMS_A_BATCH):
                self._client.log_batch(parent.info.run_id, params=params[start : start + PARAMS_A_BATCH])
        self._parent_id = parent.info.run_id
        self._client.update_run(self._parent_id, status="RUNNING")
        self._note_sent(parent)
        self._recorded = self._complete_iterations(experiment)
        _have_registered_model(self._client, self._model)

    def _complete_iterations(self, experiment: str) -> dict[int, str]:
        own = f"tags.`rollbook.run` = '{self._run}' AND tags.`rollbook.role` = 'iteration'"
        query = f"{own} AND tags.`rollbook.complete` = 'true'"
        found: dict[int, str] = {}
        token = None
        while True:
            page = self._client.search_runs([experiment], query, max_results=1000, page_token=token)
            found |= {int(run.data.tags["rollbook.iteration"]): run.info.run_id for run in page}
            for run in page:
                self._note_sent(run)
            token = page.token
            if not token:
                return found

    def _iteration(self, record: IterationRecord) -> None:
        client, stamp = self._client, max(_milliseconds(m) for m in record.manifests.values())
        tags = {
            MLFLOW_PARENT_RUN_ID: self._parent_id,
            "rollbook.run": self._run,
            "rollbook.role": "iteration",
            "rollbook.iteration": str(record.iteration),
        }
        nested = client.create_run(self._experiment, run_name=f"{self._run}/{record.iteration}", tags=tags).info.run_id
        metrics = points(record.metrics, record.iteration, stamp)
        metrics += _held_out(record.held_out, record.iteration) if record.held_out else []
        client.log_batch(nested, metrics=metrics, params=[Param("iteration", str(record.iteration))])
        client.log_batch(self._parent_id, metrics=metrics)
        tables = [m for m in record.manifests.values() if m.kind in TABLE_KINDS]
        client.log_inputs(nested, [_dataset_input(m) for m in tables])
        client.log_text(nested, record.preview, "preview.md")
        for step, manifest in record.manifests.items():
            client.log_text(nested, manifest.model_dump_json(indent=2), f"manifests/{step}.json")
        self._add_files(record, nested)
        self._register(record, nested)
        if "publish" in record.manifests:  # else a part of an iteration: the whole is told of anew
            client.log_batch(nested, tags=[RunTag("rollbook.complete", "true")])
            self._recorded[record.iteration] = nested
        client.set_terminated(nested)

    def _note_sent(self, run: MlflowRun) -> None:
        for name, value in run.data.tags.items():
            if name.startswith(SENT_TAG):
                self._sent[run.info.run_id, name] = Sent(**json.loads(value))

    def _trace_iteration(self, iteration: int, record: Callable[[], IterationRecord]) -> None:
        nested = self._recorded.get(iteration)
        if nested is None or self._has(nested, SENT_TAG):
            return
        if (tables := record().tables) is not None:
            self._trace(nested, SENT_TAG, iteration, tables)

    def _trace_evaluation(self, iteration: int, tables: Callable[[], Iterable[Scored]]) -> None:
        for answers in tables() if self._share > 0.0 else ():
            tag = f"{SENT_TAG}.{iteration}.{answers.rollouts.step}.{answers.rewards.key[:KEY_CHARACTERS]}"
            if not self._has(self._parent_id, tag):
                self._trace(self._parent_id, tag, iteration, answers)

    def _has(self, mlflow_run: str, tag: str) -> bool:
        """Whether as large a share was sent before."""
        return self._sent.get((mlflow_run, tag), NONE_SENT).share >= self._share

    def _trace(self, mlflow_run: str, tag: str, iteration: int, tables: Scored) -> None:
        """The tag comes last: what was cut short is sent anew."""
        place = Place(self._experiment, mlflow_run, self._run, iteration, tables.rollouts)
        sent = self._sender.send(place, tables, self._share, self._stop)
        if sent is not None:
            self._client.log_batch(mlflow_run, tags=[sent.as_tag(tag)])
            self._sent[mlflow_run, tag] = sent

    def _add_files(self, record: IterationRecord, nested: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path, make in record.files.items():
                file = Path(folder) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                make(file)
                parent = str(Path(path).parent)
                self._client.log_artifact(nested, str(file), artifact_path=None if parent == "." else parent)

    def _register(self, record: IterationRecord, nested: str) -> None:
        policy = record.manifests.get("publish")
        if policy is None:
            return
        tags = {
            "policy_version": str(policy.policy_version),
            "iteration": str(record.iteration),
            "digest": policy.content_digest,
        }
        source = policy.uri.rsplit("/", 1)[0]
        if self._over_http and source.startswith("file://"):
            source = source.replace("file://", "rollbook:", 1)  # a server refuses local folders: they might be anyone's
        self._client.create_model_version(self._model, source=source, run_id=nested, tags=tags)


def _brief(error: BaseException) -> str:
    """What lies under it: MLflow's client wraps a refused connection five times."""
    while under := error.__cause__ or error.__context__:
        error = under
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def experiment_id(client: MlflowClient, artifacts: Path) -> str:
    """Of Rollbook's experiment, made now if there is none, with its artifacts in that folder."""
    found = client.get_experiment_by_name(EXPERIMENT)
    return found.experiment_id if found else client.create_experiment(EXPERIMENT, artifact_location=artifacts.as_uri())


def find_run(client: MlflowClient, experiment: str, **tags: str) -> MlflowRun | None:
    """The MLflow run with these tags, given without the `rollbook.` that they begin with."""
    query = " AND ".join(f"tags.`rollbook.{name}` = '{value}'" for name, value in tags.items())
    found = client.search_runs([experiment], query, max_results=1)
    return found[0] if found else None


def _have_registered_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name, description="Policies published by this Rollbook run.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def points(values: Mapping[str, float], step: int, stamp: int) -> list[Metric]:
    """Metrics as MLflow takes them: with no @ in a name."""
    return [Metric(name.replace("@", "_at_"), float(value), stamp, step) for name, value in values.items()]


def _held_out(found: Evaluation, iteration: int) -> list[Metric]:
    """Of the same evaluation the same points, however often it is told."""
    stamp = max(map(_milliseconds, found.rewards.values()))
    return points({f"held_out/{name}": value for name, value in found.figures.items()}, iteration, stamp)


def _milliseconds(manifest: Manifest) -> int:
    """When the manifest was made: a record written twice then gives the same points."""
    return int(manifest.created_at.timestamp() * 1000)


def _dataset_input(manifest: Manifest) -> DatasetInput:
    profile = {"rows": sum(f.rows or 0 for f in manifest.files), "bytes": sum(f.bytes for f in manifest.files)}
    dataset = Dataset(
        name=f"{manifest.kind}-{manifest.iteration}",
        digest=manifest.content_digest.removeprefix("sha256:")[:DIGEST_CHARACTERS],
        source_type="rollbook",
        source=json.dumps({"uri": manifest.uri, "files": [f.uri for f in manifest.files]}),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", manifest.kind)])


def run_of(tracking_uri: str, run_id: str) -> tuple[str, int | None] | None:
    """(run, iteration if it is one's) of an MLflow run by its id; None for what is no such id, or not Rollbook's."""
    if not MLFLOW_RUN_ID.fullmatch(run_id):
        return None
    try:
        tags = MlflowClient(tracking_uri).get_run(run_id).data.tags
    except MlflowException:
        return None
    iteration = tags.get("rollbook.iteration")
    return (tags["rollbook.run"], None if iteration is None else int(iteration)) if "rollbook.run" in tags else None


def connect(tracking_uri: str) -> str:
    """Version of the MLflow that answers; raises MlflowException if none does. For `doctor`."""
    MlflowClient(tracking_uri).search_experiments(max_results=1)
    return mlflow.__version__
