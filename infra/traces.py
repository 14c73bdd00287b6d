"""MLflow: trajectories as traces, sent in bulk; the same trajectory sent twice is one trace."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from itertools import batched
from threading import Event

from mlflow.entities import (
    AssessmentError,
    AssessmentSource,
    Feedback,
    RunTag,
    Span,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.entities.assessment_source import AssessmentSourceType
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey
from mlflow.tracking import MlflowClient

from data.conversations import Scored, Trajectory
from data.manifest import Manifest
from infra.trace_spans import Clock, Message, prompt_and_answer, sound, spans, trace_name

AT_ONCE = 100  # traces in one request
NAME_CHARACTERS = 250  # what MLflow allows in sessions, tags and feedback's names
PREVIEW_CHARACTERS = 1000  # likewise
ERROR_CODE = "FAILED"


@dataclass(frozen=True)
class Sent:
    """How many trajectories of one rollouts table MLflow has as traces, with the share that was asked for."""

    sent: int
    left_out: int
    share: float

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.sent + other.sent, self.left_out + other.left_out, max(self.share, other.share))

    def as_tag(self, name: str) -> RunTag:
        return RunTag(name, json.dumps(asdict(self)))


NONE_SENT = Sent(0, 0, 0.0)


@dataclass(frozen=True)
class Place:
    """Where traces go, and what all those of one rollouts table share."""

    experiment: str
    mlflow_run: str
    run: str
    iteration: int
    rollouts: Manifest

    def trace_id(self, trajectory: Trajectory) -> str:
        """The rollouts' key is in it, as the ids of an evaluation come again in the next."""
        return f"tr-{_digest(self.run, self.iteration, self.rollouts.key, trajectory.trajectory_id)[:32]}"

    def session(self, trajectory: Trajectory) -> str:
        """Of siblings the same."""
        return _short(f"{self.run}/{self.iteration}/{self.rollouts.step}/{trajectory.root_id}")


class TraceSender:
    """Sends trajectories to one MLflow: a server, or its database."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client
        self._tracing = TracingClient(client.tracking_uri)

    def send(self, place: Place, tables: Scored, share: float, stop: Event) -> Sent | None:
        """Send a share of the trajectories; None if `stop` was set meanwhile.

        MLflow takes spans in bulk, but feedback only trace by trace: in the call that brings tags and session too.
        """
        chosen = tables.choose(share)
        for batch in batched(chosen.trajectories, AT_ONCE):
            for trajectory in batch:
                if stop.is_set():
                    return None
                self._tracing.start_trace(trace_info(place, trajectory))
            self._tracing.log_spans(place.experiment, [span for t in batch for span in trace_spans(place, t)])
        return Sent(len(chosen.trajectories), chosen.left_out, share)


def trace_info(place: Place, trajectory: Trajectory) -> TraceInfo:
    """All of a trace but its spans."""
    prompt, answer = prompt_and_answer(trajectory)
    start_ms, duration_ms = _milliseconds(place, trajectory)
    return TraceInfo(
        trace_id=place.trace_id(trajectory),
        trace_location=TraceLocation.from_experiment_id(place.experiment),
        request_time=start_ms,
        execution_duration=duration_ms,
        state=TraceState.OK if trajectory.failure is None else TraceState.ERROR,
        request_preview=_preview(prompt[-1] if prompt else None),
        response_preview=_preview(answer),
        trace_metadata={
            TraceMetadataKey.SOURCE_RUN: place.mlflow_run,
            TraceMetadataKey.TRACE_SESSION: place.session(trajectory),
        },
        tags=_tags(place, trajectory),
        assessments=feedback(place, trajectory),
    )


def trace_spans(place: Place, trajectory: Trajectory) -> list[Span]:
    """A trace's spans."""
    start_ms, duration_ms = _milliseconds(place, trajectory)
    tokens = sum(turn.length for turn in trajectory.turns)
    return spans(place.trace_id(trajectory), trajectory, Clock(start_ms * 10**6, duration_ms * 10**6, tokens))


def feedback(place: Place, trajectory: Trajectory) -> list[Feedback]:
    """The reward and its parts, by the scorer; none for what was not scored. A failed score is an error, no number."""
    score = trajectory.score
    if score.reward is None:
        return []
    failed = not math.isfinite(score.reward)
    error = AssessmentError(ERROR_CODE, sound(score.error or f"the reward is {score.reward}")) if failed else None
    found = None if score.extracted_answer is None else sound(f"extracted answer: {score.extracted_answer}")
    made = [_feedback(place, trajectory, "reward", None if failed else score.reward, error, found)]
    for name, value in score.components.items():
        if math.isfinite(value):
            made.append(_feedback(place, trajectory, f"reward/{name}", value))
    return made


def _feedback(
    place: Place,
    trajectory: Trajectory,
    name: str,
    value: float | None,
    error: AssessmentError | None = None,
    rationale: str | None = None,
) -> Feedback:
    trace_id, score = place.trace_id(trajectory), trajectory.score
    made = Feedback(
        name=_short(name),
        value=value,
        error=error,
        source=AssessmentSource(AssessmentSourceType.CODE, _short(score.scorer)),
        trace_id=trace_id,
        metadata={"scorer_digest": score.scorer_digest},
        rationale=rationale,
        create_time_ms=_milliseconds(place, trajectory)[0],
        last_update_time_ms=_milliseconds(place, trajectory)[0],
    )
    made.assessment_id = f"a-{_digest(trace_id, name)[:32]}"
    return made


def _tags(place: Place, trajectory: Trajectory) -> dict[str, str]:
    known = {
        "run": place.run,
        "iteration": place.iteration,
        "step": place.rollouts.step,
        "purpose": trajectory.purpose,
        "trajectory": trajectory.trajectory_id,
        "group": trajectory.root_id,
        "status": trajectory.status,
        "truncation": trajectory.truncation,
        "policy_version": " ".join(map(str, trajectory.policy_versions)) or None,
        "reward": trajectory.score.reward,
        "advantage": trajectory.advantage,
    }
    named = {f"rollbook.{name}": _short(str(value)) for name, value in known.items() if value is not None}
    return {TraceTagKey.TRACE_NAME: trace_name(trajectory)} | named


def _milliseconds(place: Place, trajectory: Trajectory) -> tuple[int, int]:
    """Start, and how long it took; of the table where the trajectory has none."""
    started = trajectory.started_at or place.rollouts.created_at
    return int(started.timestamp() * 1000), int(trajectory.latency_ms or 0)


def _preview(message: Message | None) -> str | None:
    if message is None:
        return None
    content = message.get("content")
    text = sound(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return text if len(text) <= PREVIEW_CHARACTERS else f"{text[: PREVIEW_CHARACTERS - 1]}…"


def _short(text: str) -> str:
    """As it is if MLflow takes it, else cut, with a digest that tells it from others."""
    plain = sound(text)
    return plain if len(plain) <= NAME_CHARACTERS else f"{plain[: NAME_CHARACTERS - 17]}~{_digest(text)[:16]}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
