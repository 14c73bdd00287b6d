"""MLflow away during a whole run: nothing of the run is lost, and one command tells MLflow afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
from mlflow.tracking import MlflowClient


@pytest.mark.slow
def test_mlflow_down_loses_nothing_and_is_told_later(desk: Callable[[str], Any]) -> None:
    mine = desk("untracked")
    away = mine.away("http://127.0.0.1:9")  # the discard port: nobody answers
    short = ("iterations=2", "warm_start.steps=0", "evaluate.problems=8", "prompts.per_iteration=8")
    said = away.run(*short)
    assert said.count("MLflow: ") == 1 and "rollbook sync-tracking small" in said
    assert mine.json("show", "small")["iterations"][1]["complete"]
    refused = away.rollbook("sync-tracking", "small", code=1)
    assert "http://127.0.0.1:9" in refused and "tries again" in refused

    assert "2 iterations" in mine.rollbook("sync-tracking", "small")
    assert 0 < len(traces(mine)) < 48
    first = history(mine)
    assert [step for step, _ in first["reward/mean"]] == [0, 1]
    assert [step for step, _ in first["held_out/greedy"]] == [0, 2]
    every = "2 iterations, 48 of 48 trajectories as traces"  # 8 an iteration, 8 sampled and 8 greedy before and after
    assert every in mine.rollbook("sync-tracking", "small", "--traces", "1")
    assert history(mine) == first
    sent = traces(mine)
    assert len(set(sent)) == len(sent) == 48


def traces(desk: Any) -> list[tuple[str, str, str]]:
    """(iteration, step, trajectory) of each."""
    client = MlflowClient(f"sqlite:///{desk.folder}/.rollbook/mlflow.db")
    experiment = client.get_experiment_by_name("rollbook")
    found = client.search_traces(locations=[experiment.experiment_id], max_results=500, include_spans=False)
    names = ("iteration", "step", "trajectory")
    return sorted(tuple(trace.info.tags[f"rollbook.{name}"] for name in names) for trace in found)


def history(desk: Any) -> dict[str, list[tuple[int, float]]]:
    client = MlflowClient(f"sqlite:///{desk.folder}/.rollbook/mlflow.db")
    experiment = client.get_experiment_by_name("rollbook")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(r.data.tags.get("rollbook.iteration", "-") for r in runs) == ["-", "0", "1"]
    (parent,) = [r for r in runs if r.data.tags["rollbook.role"] == "run"]
    assert len(client.search_model_versions("name = 'small'")) == 2
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(parent.info.run_id, name)]
        for name in ("reward/mean", "held_out/greedy")
    }
