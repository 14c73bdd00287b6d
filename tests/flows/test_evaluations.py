"""Evaluations between iterations, several answers a problem, and other settings on the way: on a real run."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pytest
from mlflow.tracking import MlflowClient

from data.ledger import Ledger
from data.store import Store
from data.tables import read_table
from flows import reading
from flows.config import load
from flows.pages import iteration_page
from flows.training import evaluate_policy, plan
from infra.home import Home
from tests.recorder import SORT, record_run


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
    assert json.loads(rollbook("verify", "evaluated", "--json"))["ok"]
    # What was made of the last policy, version 12: 4 updates an iteration.
    made_of = rollbook("lineage", "evaluated@12")
    assert "evaluated/3/evaluate_sampled" in made_of and "evaluated/000003/evaluate_sampled-" in made_of


def made_before(ledger: Ledger, iteration: int, first: str, second: str) -> bool:
    made = {m.step: m for m in ledger.steps(iteration)}
    return made[first].created_at < made[second].created_at


def test_a_sweep_evaluates_its_variants_likewise(rollbook: Callable[..., str]) -> None:
    """Of one policy, two or four answers to each of seven problems."""
    grid = ("--grid", "evaluate.samples=2,4", "--grid", "evaluate.problems=7")
    said = rollbook("sweep", "small", "--iteration", "2", *grid, "--evaluate", "--json")
    few, many = (variant["metrics"] for variant in json.loads(said)["variants"])
    assert few["held_out/sampled"] == few["held_out/avg@2"] and many["held_out/sampled"] == many["held_out/avg@4"]
    assert few["held_out/greedy"] == many["held_out/greedy"]
    assert many["held_out/pass@1"] == pytest.approx(many["held_out/avg@4"])  # rewards are 0 or 1
    assert many["held_out/pass@1"] <= many["held_out/pass@2"] <= many["held_out/pass@4"]


@pytest.mark.parametrize(
    ("recorded", "every", "evaluated"),
    [(0, None, [0, 5]), (0, 2, [0, 2, 4, 5]), (3, 2, [0, 4, 5]), (4, 2, [0, 4, 5]), (5, 2, [0, 5]), (0, 5, [0, 5])],
)
def test_what_is_evaluated(tmp_path: Path, recorded: int, every: int | None, evaluated: list[int]) -> None:
    """The first policy and the last, and of those between each that starts an iteration which is still to come."""
    overrides = [f"evaluate.every={every}"] if every else []
    config = load(SORT, [f"resources.store=file://{tmp_path}/store", "iterations=5", *overrides])
    run, _ = record_run(config, Home(tmp_path), recorded)
    plan(config, run)
    notes = [(note.step, note.iteration) for note in run.notes]
    assert [k for step, k in notes if step == "evaluate_sampled"] == evaluated
    for k in evaluated[1:-1]:
        assert notes.index(("score_greedy", k)) < notes.index(("generate", k))


def test_an_evaluation_between_is_not_the_end(tmp_path: Path) -> None:
    """Two of four iterations, and the evaluation after them; as the last act of a shorter run it is the end."""
    store = f"resources.store=file://{tmp_path}/store"
    for every, status in (("2", "stopped"), ("3", "complete")):
        config = load(SORT, [store, "iterations=4", f"run=every{every}", f"evaluate.every={every}"])
        run, head = record_run(config, Home(tmp_path), 2)
        evaluate_policy(config, run, 2, head)
        record = run.ledger.record
        assert record is not None
        assert reading.row(run.ledger, record, Home(tmp_path))["status"] == status


def test_the_page_of_an_iteration_tells_of_the_policy_before(tmp_path: Path) -> None:
    from data.summary import summarize_iteration

    config = load(SORT, [f"resources.store=file://{tmp_path}/store"])
    run, head = record_run(config, Home(tmp_path), 1)
    assert "Held-out" not in iteration_page(summarize_iteration(run.ledger, 0))
    evaluate_policy(config, run, 0, head)
    assert "| sampled | 0.500 |\n| greedy | 0.500 |" in iteration_page(summarize_iteration(run.ledger, 0))
