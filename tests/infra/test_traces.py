"""Trajectories as traces in a real MLflow, by its database; by its server: tests/flows/test_servers.py."""

import logging
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from mlflow.entities import Trace
from mlflow.tracking import MlflowClient

from data.conversations import Scored
from data.ledger import Ledger
from data.store import Store
from infra.trace_spans import messages_by_turn
from infra.traces import Place, Sent, TraceSender
from infra.tracking import EXPERIMENT, IterationRecord, Tracker
from tests.conversations import PROMPT, TOOLS, by_trajectory, record, short


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return record(Ledger(Store(str(tmp_path_factory.mktemp("store"))), "hand"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    return MlflowClient(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db")


@pytest.fixture(scope="module")
def place(client: MlflowClient, tables: Scored) -> Place:
    experiment = client.create_experiment("hand")
    return Place(experiment, client.create_run(experiment).info.run_id, "hand", 0, tables.rollouts)


@pytest.fixture(scope="module")
def sent(client: MlflowClient, place: Place, tables: Scored) -> dict[str, Trace]:
    """What MLflow has after everything was sent twice, by trajectory."""
    sender = TraceSender(client)
    assert sender.send(place, tables, 1.0, Event()) == Sent(5, 0, 1.0)
    once = by_trajectory(client, place.experiment, place.mlflow_run)
    assert sender.send(place, tables, 1.0, Event()) == Sent(5, 0, 1.0)
    twice = by_trajectory(client, place.experiment, place.mlflow_run)
    assert {name: trace.to_dict() for name, trace in twice.items()} == {n: t.to_dict() for n, t in once.items()}
    return twice


def test_every_trajectory_is_one_trace_of_its_run(sent: dict[str, Trace]) -> None:
    assert sorted(sent) == ["A/0", "A/1", "B/0", "B/1", "C/0"]


def test_traces_are_found_by_tag(client: MlflowClient, place: Place, sent: dict[str, Trace]) -> None:
    wanted = {"rollbook.group": "A", "rollbook.status": "truncated", "rollbook.policy_version": "7"}
    query = " AND ".join(f"tags.`{name}` = '{value}'" for name, value in wanted.items())
    (found,) = client.search_traces(locations=[place.experiment], filter_string=query)
    tags = {name: value for name, value in found.info.tags.items() if name.startswith("rollbook.")}
    assert tags == {
        "rollbook.run": "hand",
        "rollbook.iteration": "0",
        "rollbook.step": "generate",
        "rollbook.purpose": "train",
        "rollbook.trajectory": "A/1",
        "rollbook.group": "A",
        "rollbook.status": "truncated",
        "rollbook.truncation": "length",
        "rollbook.policy_version": "7",
        "rollbook.reward": "0.0",
        "rollbook.advantage": "-0.5",
    }


def test_siblings_share_a_session(sent: dict[str, Trace]) -> None:
    sessions = {name: trace.info.trace_metadata["mlflow.trace.session"] for name, trace in sent.items()}
    assert sessions["A/0"] == sessions["A/1"] == "hand/0/generate/A"
    assert sessions["B/0"] == sessions["B/1"] == "hand/0/generate/B"


def test_a_conversation_with_tools_is_a_span_a_turn_and_a_call(sent: dict[str, Trace]) -> None:
    trace = sent["B/0"]
    root, *turns = trace.data.spans
    assert [(s.name, s.span_type) for s in turns] == [
        ("user", "CHAIN"),
        ("assistant", "CHAT_MODEL"),
        ("add", "TOOL"),
        ("clock", "TOOL"),
        ("assistant", "CHAT_MODEL"),
    ]
    assert {s.parent_id for s in turns} == {root.span_id}
    assert root.inputs == {"messages": PROMPT}
    assert root.outputs["choices"][0]["message"] == {"role": "assistant", "content": "41"}
    _, first, add, clock, last = turns
    assert (first.inputs, first.outputs["choices"][0]["message"]) == ({"messages": PROMPT}, TOOLS[2])
    assert (add.inputs, add.outputs) == ({"a": 20, "b": 21}, "41")
    assert (clock.inputs, clock.outputs, clock.status.description) == ("{not json", "no clock", "no clock")
    assert last.inputs == {"messages": TOOLS[:-1]} and last.outputs["choices"][0]["finish_reason"] == "stop"
    assert [s.attributes.get("rollbook.policy_version") for s in (first, last)] == [7, 8]
    assert trace.info.tags["rollbook.policy_version"] == "7 8"


def test_tokens_are_counted_and_lie_on_the_clock(sent: dict[str, Trace]) -> None:
    """Spans of 4, 3, 2 and 1 tokens, 4 of 10 sampled, in 100 ms."""
    trace = sent["B/0"]
    assert trace.info.token_usage == {"input_tokens": 6, "output_tokens": 4, "total_tokens": 10}
    root, user, first, *_, last = trace.data.spans
    usage = [s.attributes["mlflow.chat.tokenUsage"] for s in (first, last)]
    assert [(u["input_tokens"], u["output_tokens"]) for u in usage] == [(4, 3), (9, 1)]
    begun = [(s.start_time_ns - root.start_time_ns) // 10**6 for s in (root, user, first, last)]
    assert begun == [0, 0, 40, 90] and trace.info.execution_duration == 100


def test_reward_and_its_parts_are_feedback(sent: dict[str, Trace]) -> None:
    found = {a.name: a for a in sent["A/0"].info.assessments}
    values = {name: assessment.feedback.value for name, assessment in found.items()}
    assert values == {"reward": 1.0, "reward/right": 1.0, "reward/brevity": -0.25}
    assert (found["reward"].source.source_type, found["reward"].source.source_id) == ("CODE", "exact")
    assert found["reward"].rationale == "extracted answer: 4"


def test_failures_are_errors_and_no_numbers(sent: dict[str, Trace]) -> None:
    scorer, engine = sent["B/1"], sent["C/0"]
    assert [trace.info.state.value for trace in (scorer, engine, sent["A/1"])] == ["ERROR", "ERROR", "OK"]
    (judged,) = scorer.info.assessments
    assert judged.feedback.value is None and judged.error.error_message == "ValueError: half a pair"
    assert engine.data.spans[0].status.description == "engine: out\N{REPLACEMENT CHARACTER}of memory"
    assert [s.name for s in engine.data.spans] == ["trajectory", "user"] and engine.data.spans[0].outputs is None


def test_a_share_is_whole_groups_with_the_best_and_the_worst(
    client: MlflowClient, place: Place, tables: Scored
) -> None:
    """A of A, B and C has the best reward and the worst."""
    run = client.create_run(place.experiment).info.run_id
    elsewhere = replace(place, run="part", mlflow_run=run)
    assert TraceSender(client).send(elsewhere, tables, 0.2, Event()) == Sent(2, 3, 0.2)
    assert sorted(by_trajectory(client, place.experiment, run)) == ["A/0", "A/1"]


def test_sending_stops_when_told(client: MlflowClient, place: Place, tables: Scored) -> None:
    stop = Event()
    stop.set()
    assert TraceSender(client).send(replace(place, run="stopped"), tables, 1.0, stop) is None
    assert not client.search_traces(locations=[place.experiment], filter_string="tags.`rollbook.run` = 'stopped'")


def test_what_no_database_takes_is_replaced(client: MlflowClient, place: Place, tmp_path: Path) -> None:
    """A lone surrogate, NUL, and a group's name beyond MLflow's 250 characters."""
    odd = "NUL \0, half \ud83d, \N{SNOWMAN}"
    tables = record(Ledger(Store(str(tmp_path)), "odd"), (short("q" * 300 + "/0", odd, 1.0),))
    TraceSender(client).send(replace(place, run="odd", rollouts=tables.rollouts), tables, 1.0, Event())
    (found,) = client.search_traces(locations=[place.experiment], filter_string="tags.`rollbook.run` = 'odd'")
    assert found.info.response_preview == "NUL \N{REPLACEMENT CHARACTER}, half ?, \N{SNOWMAN}"
    assert found.data.spans[0].outputs["choices"][0]["message"]["content"] == "NUL \0, half ?, \N{SNOWMAN}"
    assert len(found.info.trace_metadata["mlflow.trace.session"]) == 250


def test_messages_are_cut_at_what_the_policy_wrote(tables: Scored) -> None:
    """A prompt's own assistant message is no turn's; where messages do not tell, the decoded text does."""
    (turns,) = [t.turns for t in tables.choose(1.0).trajectories if t.trajectory_id == "A/0"]
    shot = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    answer = {"role": "assistant", "content": "!"}
    assert messages_by_turn([*shot, answer], turns) == [shot, [answer]]
    lost = [[{"role": role, "content": "..."}] for role in ("user", "assistant")]
    assert messages_by_turn(shot[:1], turns) == lost


def told(client: MlflowClient, tables: Scored, share: float, status: str = "FINISHED") -> Tracker:
    """A tracker that has told of iteration 0 of the run "hand", and ended."""
    tracker = Tracker(client.tracking_uri, Path("/nowhere"), "hand", "file:///nowhere", {}, traces=share)
    made = {"generate": tables.rollouts, "publish": tables.rollouts}
    if status == "KILLED":
        tracker._stop.set()  # as if its close came before its traces' turn
    tracker.iteration(0, lambda: IterationRecord(0, made, {"reward/mean": 0.5}, "page", tables=tables))
    tracker.close(status)
    return tracker


def test_a_tracker_sends_what_is_missing(
    client: MlflowClient, tables: Scored, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None of a run that was stopped, or of a damaged table; a share, all, and no less for a smaller share."""
    client.create_experiment(EXPERIMENT, artifact_location=tmp_path.as_uri())
    caplog.set_level(logging.INFO, "rollbook")
    damaged = replace(tables, rewards=tables.rewards.model_copy(update={"files": ()}))
    assert told(client, tables, 1.0, "KILLED").sent == Sent(0, 0, 0.0)
    assert not caplog.text
    assert told(client, damaged, 1.0).sent == Sent(0, 0, 0.0)
    assert "MLflow traces: ValueError: " in caplog.text and "sync-tracking hand" in caplog.text
    assert told(client, tables, 0.2).sent == Sent(2, 3, 0.2)
    assert "MLflow has 2 of 5 trajectories as traces; `rollbook sync-tracking hand --traces 1` sends all" in caplog.text
    caplog.clear()
    assert told(client, tables, 1.0).sent == Sent(5, 0, 1.0)
    assert told(client, damaged, 0.2).sent == Sent(5, 0, 1.0)  # the tables are not even read
    assert not caplog.text
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    (nested,) = client.search_runs([experiment], "tags.`rollbook.role` = 'iteration'")
    assert nested.data.metrics == {"reward/mean": 0.5}
    assert sorted(by_trajectory(client, experiment, nested.info.run_id)) == ["A/0", "A/1", "B/0", "B/1", "C/0"]
