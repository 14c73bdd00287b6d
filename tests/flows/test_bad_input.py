"""What a user sees who gets something wrong: one line with value, rule and fix, exit code 1, nothing written."""

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def fresh(desk: Callable[[str], Any]) -> Any:
    return desk("bad-input")


def told(fresh: Any, *overrides: str) -> str:
    """The run's complaint; it must be short, without traceback, and leave no run in the store."""
    return short(fresh, fresh.run("run=wrong", *overrides, code=1))


def short(fresh: Any, said: str) -> str:
    assert "Traceback" not in said and len(said.strip().splitlines()) <= 2, said
    assert not (fresh.folder / ".rollbook/store/wrong").exists()
    return said


def config_for(fresh: Any, rows: str) -> str:
    """A config whose prompts are the given JSONL text."""
    (fresh.folder / "rows.jsonl").write_text(rows)
    file = fresh.folder / "rows.toml"
    source = fresh.folder / "rows.jsonl"
    file.write_text(f"run = 'wrong'\n[prompts]\nsource = '{source}'\nper_iteration = 1\n[evaluate]\nproblems = 0\n")
    return str(file)


def test_broken_row_names_file_and_line(fresh: Any) -> None:
    rows = json.dumps({"prompt": "1+1", "metadata": {"answer": "2"}}) + '\n{"prompt": \n'
    assert "rows.jsonl:2" in short(fresh, fresh.rollbook("run", config_for(fresh, rows), code=1))


def test_empty_data_set(fresh: Any) -> None:
    assert "rows.jsonl" in short(fresh, fresh.rollbook("run", config_for(fresh, ""), code=1))


def test_unknown_model_family_is_refused_by_name(fresh: Any) -> None:
    folder = fresh.folder / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    for said in (told(fresh, f"model.path={folder}"), fresh.rollbook("import-model", str(folder), code=1)):
        assert "GPT2LMHeadModel" in said and "Qwen3" in said and "Llama" in said


def test_missing_model_folder(fresh: Any) -> None:
    assert "no such folder" in told(fresh, "model.path=/nowhere/model")


def test_store_that_cannot_be_written(fresh: Any) -> None:
    (fresh.folder / "file").write_text("in the way")
    said = told(fresh, f"resources.store={fresh.folder / 'file' / 'store'}")
    assert "cannot be written" in said and "resources.store" in said


def test_temperature_zero(fresh: Any) -> None:
    assert "sampling.temperature = 0" in told(fresh, "sampling.temperature=0")


def test_bad_run_name(fresh: Any) -> None:
    assert "run name '../x'" in fresh.run("run=../x", code=1)


def test_missing_scorer_file_and_function(fresh: Any) -> None:
    assert "nowhere.py" in told(fresh, "reward.scorer=nowhere.py:score")
    (fresh.folder / "mine.py").write_text("def scoer(response, metadata):\n    return 1.0\n")
    assert "scoer" in told(fresh, f"reward.scorer={fresh.folder / 'mine.py'}:score")


def test_unknown_run_iteration_and_trajectory(finished: tuple[Any, str]) -> None:
    desk, _ = finished
    assert "did you mean 'small'" in desk.rollbook("show", "smal", code=1)
    assert "on record: 0 to 2" in desk.rollbook("show", "small", "--iteration", "9", code=1)
    assert "lists the ids" in desk.rollbook("show", "small", "--trajectory", "none@0/0", code=1)


@pytest.mark.slow
def test_prompt_longer_than_the_context(fresh: Any) -> None:
    """The toy's context is 512 tokens; the run stops at generate, with nothing of the iteration on record."""
    row = {"prompt_id": "long", "prompt": "x" * 600, "metadata": {"answer": "y"}}
    said = fresh.rollbook("run", config_for(fresh, json.dumps(row)), "--set", "run=long", code=1)
    assert "prompt long" in said and "512" in said and "shorten" in said
    assert not list((fresh.folder / ".rollbook/store/long").glob("0*/*/manifest.json"))


def test_altered_and_missing_tables_are_named(desk: Callable[[str], Any], finished: tuple[Any, str]) -> None:
    """A byte of a recorded table changes, then the file goes: the next command that reads it says which and how."""
    import shutil

    mine = desk("altered")
    shutil.copytree(finished[0].folder / ".rollbook/store", mine.folder / ".rollbook/store")
    (table,) = (mine.folder / ".rollbook/store/small/000000/generate").glob("*/rollouts-000.parquet")
    kept = mine.folder / "kept.parquet"
    shutil.copyfile(table, kept)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(bytes(data))
    said = mine.rollbook("show", "small", "--iteration", "0", code=1)
    assert "rollouts-000.parquet: altered: sha256" in said
    table.unlink()
    assert "rollouts-000.parquet: missing" in mine.rollbook("show", "small", "--iteration", "0", code=1)
    shutil.copyfile(kept, table)
    assert "32 trajectories" in mine.rollbook("show", "small", "--iteration", "0")


def test_taken_port(fresh: Any) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} for MLflow is taken" in fresh.rollbook("up", "--mlflow-port", str(port), code=1)


@pytest.mark.slow
def test_loss_that_is_not_finite_stops_the_run(fresh: Any) -> None:
    """Rewards of 3e38 overflow the squared error of the value loss: stopped before any weight moved."""
    (fresh.folder / "huge.py").write_text("def score(response, metadata):\n    return 3e38\n")
    sick = [f"reward.scorer={fresh.folder / 'huge.py'}:score", "advantage.whiten=false", "run=sick"]
    said = fresh.run(*sick, "warm_start.steps=0", "evaluate.problems=0", code=1)
    assert "iteration 0, optimizer step 0" in said and "not finite" in said and "sort-" in said
    recorded = {path.parent.name for path in (fresh.folder / ".rollbook/store/sick/000000").glob("*/manifest.json")}
    assert recorded == {"generate", "score", "replay", "advantages"}
