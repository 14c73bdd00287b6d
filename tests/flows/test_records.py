"""The commands about records, on a finished real run: lineage, diff, why, verify, query, prune and rm."""

import csv
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from data.ledger import Fork, Ledger
from data.store import Store
from flows.cli import app
from infra import driver
from tests.data.places import files_of, vandalise

Tool = Callable[..., Any]


def tool_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Commands of a home, in this process: what they print, as JSON if they are asked for it. Fails on another code."""
    monkeypatch.setenv("ROLLBOOK_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def call(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if "--json" in arguments else " ".join(done.output.split())

    return call


@pytest.fixture
def tool(finished: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> Tool:
    return tool_at(finished[0].folder / ".rollbook", monkeypatch)


@pytest.fixture
def copy(finished: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tool, Store]:
    """Commands of a home whose store may be altered."""
    shutil.copytree(finished[0].folder / ".rollbook/store", tmp_path / "store")
    return tool_at(tmp_path, monkeypatch), Store(f"file://{tmp_path}/store")


def test_lineage_of_a_policy_reaches_all_that_it_was_made_of(finished: tuple[Any, str], tool: Tool) -> None:
    found = tool("lineage", "small@8", "--json")
    names = {node["name"] for node in found["up"] if node["run"]}
    steps = ("generate", "score", "replay", "advantages", "train", "publish")
    assert names == {f"small/{k}/{step}" for k in (0, 1) for step in steps} - {"small/1/publish"}
    assert [node["step"] for node in found["up"] if not node["run"]] == ["import_model", "warm_start"]
    after = {f"small/2/{step}" for step in steps}
    evaluated = {f"small/3/{what}_{how}" for what in ("evaluate", "score") for how in ("sampled", "greedy")}
    assert {n["name"] for n in found["down"] if n["kind"] != "checkpoint"} == after | evaluated
    prompts = finished[0].manifest(0, "generate").inputs["prompts"]
    assert found["outside"] == {prompts: "prompts"} and found["runs"] == {"small": 0}
    text = finished[0].rollbook("lineage", "small/1/publish", "--depth", "2")
    assert "policy small/1/publish" in text and "small/1/train" in text and "model xs" in text and prompts in text


def test_lineage_of_a_trajectory_and_of_mlflow_runs(finished: tuple[Any, str], tool: Tool) -> None:
    chosen = finished[0].json("show", "small", "--iteration", "1")["trajectories"][5]["trajectory_id"]
    assert tool("lineage", f"small:{chosen}", "--json")["node"]["name"] == "small/1/generate"
    client = MlflowClient(f"sqlite:///{finished[0].folder}/.rollbook/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'rollbook'")
    told = {run.info.run_name: run.info.run_id for run in client.search_runs([experiment.experiment_id])}
    assert tool("lineage", told["small/1"], "--json")["node"]["name"] == "small/1/publish"
    assert tool("lineage", told["small"], "--json")["node"]["name"] == "small/2/publish"
    assert "in MLflow at sqlite" in tool("lineage", "0" * 32, code=1)


def test_diff(finished: tuple[Any, str], tool: Tool) -> None:
    """Evaluations before and after training: the same problems, answered otherwise by another policy."""
    found = tool("diff", "small/0/score_greedy", "small/3/score_greedy", "--json")
    assert [field["name"] for field in found["keyed"]] == ["inputs.rollouts"]
    assert found["tables"]["rewards"]["rows"] == 24 and not found["tables"]["rewards"]["only_again"]
    rewards = {column["column"]: column for column in found["tables"]["rewards"]["columns"]}
    assert rewards["reward"]["largest"] == 1.0 and "latency_ms" not in rewards
    assert "small/0/generate" not in tool("diff", "small", "small")
    assert "compare two of one kind" in tool("diff", "small/0/score", "small/0/replay", code=1)


def test_why(tool: Tool) -> None:
    assert "nothing: it is on record under this key" in tool("why", "small", "--iteration", "1", "--step", "train")
    found = tool("why", "small", "--iteration", "1", "--step", "train", "--set", "train.optimizer.lr=0.5", "--json")
    fields = [{"name": "config.train.optimizer.lr", "recorded": "0.0002", "now": "0.5"}]
    assert found["fields"] == fields
    assert found["above"] == [{"step": "train", "iteration": 0, "fields": fields}]


def test_verify(finished: tuple[Any, str], copy: tuple[Tool, Store]) -> None:
    tool, store = copy
    found = tool("verify", "small", "--json")
    rollouts = next(kind for kind in found["kinds"] if kind["kind"] == "rollouts")
    assert found["ok"] and (rollouts["manifests"], rollouts["files"]) == (7, 7)  # 3 iterations, 2 evaluations of 2
    lost = Ledger(store, "small").steps(1)[-1].files[0].uri
    vandalise(store, lost, None)
    said = tool("verify", "small", code=1)
    assert lost in said.replace(" ", "") and "1 fault" in said and "error" not in said


def test_query(finished: tuple[Any, str], tool: Tool) -> None:
    means = [finished[0].manifest(k, "score").metrics["reward/mean"] for k in range(3)]
    sql = "SELECT iteration, avg(reward) AS mean FROM rewards GROUP BY 1 ORDER BY 1"
    assert tool("query", "small", sql, "--json") == {
        "columns": ["iteration", "mean"],
        "rows": [[k, m] for k, m in enumerate(means)],
    }
    assert "3 rows" in tool("query", "small", sql)
    nested = "SELECT 0.5 AS a, [1, 2] AS b, NULL AS c, 'x,y' AS d, 'nan'::FLOAT AS e"
    printed = CliRunner().invoke(app, ["query", "small", nested, "--csv"]).stdout
    assert list(csv.reader(io.StringIO(printed))) == [["a", "b", "c", "d", "e"], ["0.5", "[1, 2]", "", "x,y", "nan"]]
    assert tool("query", "small", nested, "--json")["rows"] == [[0.5, [1, 2], None, "x,y", None]]
    assert "nope" in tool("query", "small", "SELECT nope FROM rewards", code=1)


def test_prune_says_and_then_does(copy: tuple[Tool, Store], tmp_path: Path) -> None:
    """A killed attempt of two days ago, and a local copy that nothing asked for since; the run stays whole."""
    tool, store = copy
    before = files_of(store)
    left, old = f"small/000001/train/{'0' * 32}/w", time.time() - 48 * 3600
    store.create(left, b"left")
    os.utime(tmp_path / "store" / left, (old, old))
    (tmp_path / "cache" / ("a" * 64)).mkdir(parents=True)
    os.utime(tmp_path / "cache" / ("a" * 64), (old, old))
    found = tool("prune", "--json")
    assert [removal["paths"] for removal in found["removals"]] == [[left]] and len(found["copies"]) == 1
    assert "--yes removes it" in tool("prune") and left in files_of(store)
    assert "unfinished attempt" in tool("prune", "--yes")
    assert files_of(store) == before and not (tmp_path / "cache" / ("a" * 64)).exists()
    assert "nothing to remove" in tool("prune")
    assert tool("verify", "small", "--json")["ok"]


def test_rm_says_refuses_and_then_does(copy: tuple[Tool, Store], tmp_path: Path) -> None:
    tool, store = copy
    record = Ledger(store, "small").record
    assert record is not None
    child = record.model_copy(update={"run": "child", "fork": Fork(run="small", iteration=1, step="train")})
    store.create("child/run.json", child.model_dump_json().encode())
    assert "child refer to it" in tool("rm", "small", "--yes", code=1)
    store.remove(["child/run.json"])
    with driver.driving(tmp_path / "runs" / "small", "small"):
        assert "is driven by process" in tool("rm", "small", "--yes", code=1)
    before = files_of(store)
    assert "--yes removes it" in tool("rm", "small") and files_of(store) == before
    assert "removed" in tool("rm", "small", "--yes")
    assert files_of(store) == [path for path in before if path.startswith("shared/")]
    assert "not on record" in tool("rm", "small", code=1)
