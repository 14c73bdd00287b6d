"""What a user sees of a run, and what its ledger, MLflow and Prefect hold, on real components."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from data.tables import read_table
from ops.ragged import from_arrow

STEPS = ["generate", "score", "replay", "advantages", "train", "publish"]


def test_output_tells_progress_result_and_where_to_look(finished: tuple[Any, str]) -> None:
    desk, said = finished
    for iteration in range(3):
        assert sum(line.split()[:2] == [str(iteration), "reward"] for line in said.splitlines()) == 1
    for words in ("held-out: sampled", "→", "mean training reward", "rollbook up", "rollbook show small --iteration 2"):
        assert words in said
    assert (desk.folder / ".rollbook/runs/small/curves.png").read_bytes().startswith(b"\x89PNG")


def test_every_step_is_on_record_with_its_lineage(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    for k in range(3):
        made = {name: desk.manifest(k, name) for name in STEPS}
        before = desk.manifest(k - 1, "publish") if k else None
        assert made["score"].inputs == {"rollouts": made["generate"].content_digest}
        assert made["train"].inputs["advantages"] == made["advantages"].content_digest
        assert made["publish"].inputs["state"] == made["train"].content_digest
        if before is not None:
            assert made["generate"].inputs["policy"] == before.content_digest
        # 32 prompts an iteration; 2 epochs of 2 mini-batches: 4 optimizer updates.
        assert made["generate"].facts["cursor"] == {"start": 32 * k, "end": 32 * (k + 1)}
        assert made["publish"].policy_version == 4 * (k + 1)
        versions = {turn["policy_version"] for row in read_table(desk.ledger.store, made["generate"], ["turns"])
                    ["turns"].to_pylist() for turn in row if turn["is_generated"]}  # fmt: skip
        assert versions == {4 * k}


def test_c07_mask_counts_sampled_tokens_and_trainer_agrees_with_engine(finished: tuple[Any, str]) -> None:
    """Sum of action_mask = tokens the engine sampled; at those, |trainer's log-prob - engine's| <= 1e-4 in fp32."""
    desk, _ = finished
    for k in range(3):
        rollouts = read_table(desk.ledger.store, desk.manifest(k, "generate"))
        replays = read_table(desk.ledger.store, desk.manifest(k, "replay"))
        mask = from_arrow(rollouts["action_mask"], "action_mask").values
        spoken = sum(t["length"] for row in rollouts["turns"].to_pylist() for t in row if t["is_generated"])
        assert mask.sum() == spoken == desk.manifest(k, "generate").metrics["generate/tokens"]
        engine = from_arrow(rollouts["rollout_logprobs"], "rollout_logprobs").values
        trainer = from_arrow(replays["old_logprobs"], "old_logprobs").values
        assert np.abs(engine - trainer)[mask].max() <= 1e-4
        assert (engine[~mask] == 0).all() and (trainer[~mask] == 0).all()


def test_first_mini_batch_has_ratio_one(finished: tuple[Any, str]) -> None:
    """Old log-probs come from replay in training's own micro-batches: exactly 1, not nearly."""
    desk, _ = finished
    for k in range(3):
        updates = desk.manifest(k, "train").facts["updates"]
        assert len(updates) == 4
        assert updates[0]["ratio/min"] == updates[0]["ratio/max"] == 1.0
        assert updates[1]["ratio/max"] > 1.0


def test_lr_follows_its_warm_up(finished: tuple[Any, str]) -> None:
    """2e-4 after 20 steps of linear warm-up, 4 steps an iteration: step s (from 0) has lr 2e-4 (s + 1) / 20."""
    desk, _ = finished
    lrs = [u["lr"] for k in range(3) for u in desk.manifest(k, "train").facts["updates"]]
    assert lrs == pytest.approx([2e-4 * (s + 1) / 20 for s in range(12)])


def test_trajectories_repeat_no_prompt_and_none_is_held_out(finished: tuple[Any, str]) -> None:
    desk, _ = finished

    def prompts(iteration: int, name: str) -> list[str]:
        table = read_table(desk.ledger.store, desk.manifest(iteration, name), ["messages"])
        return [json.loads(m)[-2]["content"] for m in table["messages"].to_pylist()]

    trained = [p for k in range(3) for p in prompts(k, "generate")]
    assert len(set(trained)) == 96
    assert prompts(0, "evaluate_sampled") == prompts(3, "evaluate_sampled") == prompts(3, "evaluate_greedy")
    assert not set(trained) & set(prompts(0, "evaluate_sampled"))


def test_tables_are_small_arguments(finished: tuple[Any, str]) -> None:
    """C27: what travels to a step is its request: manifests, never data. The largest one stays below 64 KiB."""
    import pickle

    desk, _ = finished
    from data.request import Request

    inputs = {name: desk.manifest(2, name) for name in ("generate", "replay", "advantages", "train")}
    assert len(pickle.dumps(Request(step="train", step_version=1, kind="state", inputs=inputs))) < 64 * 1024


def test_show_and_ls(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    shown = desk.json("show", "small")
    assert shown["run"] == "small" and [i["iteration"] for i in shown["iterations"]] == [0, 1, 2]
    for when, iteration in (("before", 0), ("after", 3)):
        for decoding in ("sampled", "greedy"):
            recorded = desk.manifest(iteration, f"score_{decoding}").metrics["reward/mean"]
            assert shown["held_out"][when][decoding] == recorded
    assert shown["iterations"][1]["seconds"]["train"] == desk.manifest(1, "train").seconds
    runs = desk.json("ls")["runs"]
    assert [(r["run"], r["iterations"], r["status"]) for r in runs] == [("small", 3, "complete")]

    one = desk.json("show", "small", "--iteration", "1")
    assert len(one["trajectories"]) == 32
    # Engine and trainer in float32, with the same weights: as good as equal.
    assert one["mismatch"]["measured"]
    assert sum(one["mismatch"]["counts"]) == desk.manifest(1, "generate").metrics["generate/tokens"]
    assert one["metrics"]["engine_kl/k3"] <= 1e-8 and one["metrics"]["engine_ratio/max"] == pytest.approx(1, abs=1e-3)
    chosen = one["trajectories"][7]
    whole = desk.json("show", "small", "--trajectory", chosen["trajectory_id"])
    assert (whole["iteration"], whole["reward"], whole["advantage"]) == (1, chosen["reward"], chosen["advantage"])
    assert [turn["role"] for turn in whole["turns"]] == ["user", "assistant"]
    text = desk.rollbook("show", "small", "--trajectory", chosen["trajectory_id"])
    assert "Sort: " in text and "reward" in text and "advantage" in text
    assert "held-out" in desk.rollbook("show", "small")


def test_mlflow_has_runs_metrics_inputs_manifests_and_versions(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    client = MlflowClient(f"sqlite:///{desk.folder}/.rollbook/mlflow.db")
    experiment = client.get_experiment_by_name("rollbook")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in runs if r.data.tags["rollbook.role"] == "run"]
    nested = {int(r.data.tags["rollbook.iteration"]): r for r in runs if r.data.tags["rollbook.role"] == "iteration"}
    assert sorted(nested) == [0, 1, 2] and parent.info.status == "FINISHED"
    assert parent.data.params["train.optimizer.lr"] == "0.0002"
    for k, run in nested.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.metrics["reward/mean"] == desk.manifest(k, "score").metrics["reward/mean"]
        digests = {d.dataset.name: d.dataset.digest for d in run.inputs.dataset_inputs}
        tables = {"rollouts": "generate", "rewards": "score", "replays": "replay", "advantages": "advantages"}
        assert digests == {f"{kind}-{k}": desk.manifest(k, s).content_digest[:36] for kind, s in tables.items()}
        manifests = {Path(f.path).stem for f in client.list_artifacts(run.info.run_id, "manifests")}
        assert set(STEPS) <= manifests
        assert [f.path for f in client.list_artifacts(run.info.run_id, "plots")] == ["plots/mismatch.png"]
        page = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/report.html")
        (root, *_) = read_table(desk.ledger.store, desk.manifest(k, "generate"), ["root_id"])["root_id"].to_pylist()
        assert f'"iteration":{k},' in page and f'"root":["{root}",' in page
        text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/preview.md")
        assert "## Best" in text and "Sort: " in text
    rewards = client.get_metric_history(parent.info.run_id, "reward/mean")
    assert [p.step for p in rewards] == [0, 1, 2]
    versions = client.search_model_versions("name = 'small'")
    assert {(v.tags["iteration"], v.tags["policy_version"], v.tags["digest"]) for v in versions} == {
        (str(k), str(4 * (k + 1)), desk.manifest(k, "publish").content_digest) for k in range(3)
    }
    held_out = client.get_metric_history(parent.info.run_id, "held_out/sampled")
    assert [p.step for p in held_out] == [0, 3]
    assert [f.path for f in client.list_artifacts(parent.info.run_id, "plots")] == ["plots/curves.png"]


def test_mlflow_has_a_share_of_the_trajectories_and_says_how_many(finished: tuple[Any, str]) -> None:
    """.05 of 32 an iteration, and of 24 in four evaluations, are 2 of each; the best and the worst are among them."""
    desk, said = finished
    assert "MLflow has 14 of 192 trajectories as traces; `rollbook sync-tracking small --traces 1` sends all" in said
    client = MlflowClient(f"sqlite:///{desk.folder}/.rollbook/mlflow.db")
    experiment = client.get_experiment_by_name("rollbook").experiment_id
    query = "tags.`rollbook.role` = 'iteration' AND tags.`rollbook.iteration` = '1'"
    (nested,) = client.search_runs([experiment], query)
    assert json.loads(nested.data.tags["rollbook.traces"]) == {"sent": 2, "left_out": 30, "share": 0.05}
    found = client.search_traces(locations=[experiment], run_id=nested.info.run_id)
    examples = desk.manifest(1, "score").facts["examples"]
    rewards = {
        trace.info.tags["rollbook.trajectory"]: assessment.feedback.value
        for trace in found
        for assessment in trace.info.assessments
        if assessment.name == "reward"
    }
    assert rewards == {example["trajectory_id"]: example["reward"] for example in examples.values()}


def test_prefect_has_the_flow_its_tasks_and_artifacts(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    with sqlite3.connect(f"file:{desk.folder}/.rollbook/prefect/prefect.db?mode=ro", uri=True) as db:
        assert db.execute("select name, state_type from flow_run").fetchall() == [("train-small", "COMPLETED")]
        tasks = db.execute("select name, state_type from task_run").fetchall()
        keys = {key for (key,) in db.execute("select distinct key from artifact")}
    assert {state for _, state in tasks} == {"COMPLETED"}
    names = [name.rsplit("-", 1)[0] for name, _ in tasks]
    assert all(names.count(s) == 3 for s in STEPS)
    assert {f"iteration-{k}" for k in range(3)} <= set(names)
    assert keys == {"iteration-small", "progress-small"}


def test_second_run_does_nothing_and_says_so(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (desk.folder / ".rollbook/store").rglob("*") if path.is_file()}
    said = desk.run()
    assert "every step is on record" in said and "held-out: sampled" in said
    after = {path: path.stat().st_mtime_ns for path in (desk.folder / ".rollbook/store").rglob("*") if path.is_file()}
    assert after == before
    assert "would run" not in desk.rollbook(*desk.small(), "--dry-run")


def test_dry_run_of_a_longer_run_says_what_would_run(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    said = desk.rollbook(*desk.small("iterations=4"), "--dry-run")
    lines = [line.split() for line in said.splitlines() if line.strip().startswith("3 ")]
    assert [line[1] for line in lines if "would" in line][:2] == ["generate", "score"]


def test_export_model_is_the_published_policy(finished: tuple[Any, str]) -> None:
    from models.weights import read_tensors, tensors_digest

    desk, _ = finished
    for iteration, arguments in ((2, ()), (0, ("--iteration", "0"))):
        folder = desk.folder / f"exported-{iteration}"
        assert f"policy {4 * (iteration + 1)} of small" in desk.rollbook(
            "export-model", "small", str(folder), *arguments
        )
        assert tensors_digest(read_tensors(folder)) == desk.manifest(iteration, "publish").content_digest
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {file.name for file in folder.iterdir()}
    assert "nothing is overwritten" in desk.rollbook("export-model", "small", str(folder), code=1)


def test_other_settings_under_the_same_name_are_refused(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    said = desk.run("train.optimizer.lr=1e-5", code=1)
    assert "train.optimizer.lr" in said and "0.0002" in said and "1e-05" in said and "--set run=NAME" in said
