"""Evaluations between iterations, several answers a problem, and other settings on the way: on a real run."""

import json
from collections.abc import Callable

import pyarrow.compute as pc
import pytest
from mlflow.tracking import MlflowClient

from data.ledger import Ledger
from data.store import Store
from data.tables import read_table
from infra.home import Home


def rewards(uri: str) -> tuple[list[list[float]], list[str]]:
    """By problem, in order; and the ids of the problems."""
    store = Store(Home.find().store_url)
    found = Ledger(store, "evaluated").open(uri)
    rollouts = read_table(store, Ledger(store, "evaluated").open(found.input_uris["rollouts"]), ["root_id", "purpose"])
    assert pc.unique(rollouts["purpose"]).to_pylist() == ["eval"]
    by_problem: dict[str, list[float]] = {}
    for root, reward in zip(
        rollouts["root_id"].to_pylist(), read_table(store, found)["reward"].to_pylist(), strict=True
    ):
        by_problem.setdefault(root, []).append(reward)
    return list(by_problem.values()), list(by_problem)


def test_between_iterations_and_under_other_settings(rollbook: Callable[..., str]) -> None:
    """A fork of iteration 1, evaluated every iteration, three answers to each of seven problems."""
    settings = ("evaluate.every=1", "evaluate.samples=3", "evaluate.problems=7")
    sets = [word for setting in settings for word in ("--set", setting)]
    rollbook("rerun", "small", "--iteration", "1", "--from", "train", "--name", "evaluated", "--continue", "1", *sets)
    shown = json.loads(rollbook("show", "evaluated", "--json"))
    found = shown["evaluations"]
    # 0 is the parent's, before its training; then before iterations 1 and 2 of the fork, and after the last.
    assert [evaluation["iteration"] for evaluation in found] == [0, 1, 2, 3]
    ledger = Ledger(Store(Home.find().store_url), "evaluated")
    for evaluation in found[1:]:
        made = {m.step: m for m in ledger.steps(evaluation["iteration"])}
        policy = {m.step: m for m in ledger.steps(evaluation["iteration"] - 1)}["publish"]
        assert made["evaluate_sampled"].inputs["policy"] == policy.content_digest
        scores, roots = rewards(made["score_sampled"].uri)
        assert [len(answers) for answers in scores] == [3] * 7 and len(roots) == 7
        assert evaluation["sampled"] == evaluation["avg@3"] == pytest.approx(sum(map(sum, scores)) / 21)
        assert evaluation["pass@3"] == pytest.approx(sum(max(answers) >= 1 for answers in scores) / 7)
        assert made["evaluate_greedy"].files[0].rows == 7
    assert made_before(ledger, 2, "evaluate_sampled", "generate")

    client = MlflowClient(Home.find().tracking_uri)
    experiment = client.get_experiment_by_name("rollbook").experiment_id
    runs = client.search_runs([experiment], "tags.`rollbook.run` = 'evaluated'")
    by_role = {run.data.tags["rollbook.role"] + run.data.tags.get("rollbook.iteration", ""): run for run in runs}
    points = client.get_metric_history(by_role["run"].info.run_id, "held_out/pass_at_3")
    assert [(point.step, point.value) for point in points] == [(e["iteration"], e["pass@3"]) for e in found[1:]]
    assert by_role["iteration2"].data.metrics["held_out/avg_at_3"] == found[2]["avg@3"]

    said = rollbook("show", "evaluated")
    assert "pass@3" in said and "±" in said
    assert f"{found[2]['sampled']:.3f} ± {found[2]['sampled/se']:.3f}" in rollbook(
        "show", "evaluated", "--iteration", "2"
    )

    # Other settings: the first and the last are made again, those between stay; nothing is refused, nothing is twice.
    before = {e["iteration"]: e["avg@3"] for e in found[1:]}
    for _ in range(2):
        rollbook("resume", "evaluated", "--set", "evaluate.samples=2", "--set", "evaluate.every=1")
        found = json.loads(rollbook("show", "evaluated", "--json"))["evaluations"]
        assert [("avg@2" in e, "avg@3" in e) for e in found[1:]] == [(True, False), (False, True), (True, False)]
        assert found[2]["avg@3"] == before[2]
        folders = [place.path.rpartition("/")[2].partition("-")[0] for place in ledger.places(3)]
        assert sorted(folders) == ["evaluate_greedy", *["evaluate_sampled"] * 2, "score_greedy", *["score_sampled"] * 2]


def made_before(ledger: Ledger, iteration: int, first: str, second: str) -> bool:
    made = {m.step: m for m in ledger.steps(iteration)}
    return made[first].created_at < made[second].created_at
