"""Repeating what is on record, in this process, with residents that all of these tests share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from data.ledger import Ledger, read_table
from data.manifest import Manifest
from data.store import Store
from infra.home import Home

TWICE = """
def score(response, metadata):
    if metadata["prompt_id"] == {first!r}:
        raise ValueError("no")
    return 2.0 * (response.strip() == metadata["answer"])
"""
STEPS = ("generate", "score", "replay", "advantages", "train", "publish")


def ledger_of(run: str = "small") -> Ledger:
    return Ledger(Store(Home.find().store_url), run)


def manifest(run: str, iteration: int, step: str) -> Manifest:
    ledger = ledger_of(run)
    found = ledger.find(ledger.at(iteration, step))
    assert found is not None, (run, iteration, step)
    return found


def files(home: Path, run: str) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in (home / "store" / run).rglob("*")
        if path.is_file()
    }


def mlflow_runs(role: str, run: str) -> list[Any]:
    client = MlflowClient(Home.find().tracking_uri)
    query = f"tags.`rollbook.role` = '{role}' AND tags.`rollbook.run` = '{run}'"
    return client.search_runs([client.get_experiment_by_name("rollbook").experiment_id], query)


def test_c26_a_fork_runs_on_the_recorded_inputs_and_leaves_the_original(
    home: Path, rollbook: Callable[..., str]
) -> None:
    """Iteration 1 again after iteration 2 exists: its inputs are iteration 1's by digest, its state that of 0."""
    before = files(home, "small")
    told = json.loads(
        rollbook("rerun", "small", "--iteration", "1", "--set", "advantage.lam=0.5", "--json").splitlines()[-1]
    )
    assert files(home, "small") == before
    fork = told["run"]
    assert fork.startswith("small.1.advantages.") and [s["step"] for s in told["steps"]] == [
        "advantages",
        "train",
        "publish",
    ]
    advantages, train = manifest(fork, 1, "advantages"), manifest(fork, 1, "train")
    for name, step in (("rollouts", "generate"), ("rewards", "score"), ("replays", "replay")):
        assert advantages.input_uris[name] == manifest("small", 1, step).uri
    assert train.inputs["state"] == manifest("small", 0, "train").content_digest
    assert train.inputs["advantages"] == advantages.content_digest != manifest("small", 1, "advantages").content_digest
    assert train.content_digest != manifest("small", 1, "train").content_digest
    assert manifest(fork, 1, "generate") == manifest("small", 1, "generate")  # the history is shared
    assert manifest(fork, 0, "publish") == manifest("small", 0, "publish")
    assert ledger_of(fork).iterations() == [0, 1]

    again = json.loads(
        rollbook("rerun", "small", "--iteration", "1", "--set", "advantage.lam=0.5", "--json").splitlines()[-1]
    )
    assert again == told  # the same command finds the same fork

    (parent,), (nested,) = mlflow_runs("run", "small"), mlflow_runs("run", fork)
    assert nested.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert nested.data.tags["rollbook.parent"] == "small" and nested.data.tags["rollbook.fork_step"] == "advantages"
    assert nested.data.tags["rollbook.changed"] == "advantage.lam was 1.0, now 0.5"
    (iteration,) = mlflow_runs("iteration", fork)
    assert rollbook("rerun", iteration.info.run_id, "--from", "train", "--through", "train", "--verify")

    # And on from there: iteration 2 of the fork samples from the fork's own policy.
    rollbook("resume", fork, "--more", "1")
    assert manifest(fork, 2, "generate").inputs["policy"] == manifest(fork, 1, "publish").content_digest
    assert manifest(fork, 2, "train").inputs["state"] == train.content_digest
    assert files(home, "small") == before


def test_a_fork_that_changes_nothing_comes_out_equal(home: Path, rollbook: Callable[..., str]) -> None:
    told = json.loads(rollbook("rerun", "small", "--iteration", "2", "--from", "replay", "--json").splitlines()[-1])
    assert told["run"] == "small.2.replay" and [s["equal"] for s in told["steps"]] == [True] * 4


def test_only_the_steps_asked_for(home: Path, rollbook: Callable[..., str]) -> None:
    told = rollbook(
        "rerun", "small", "--iteration", "0", "--from", "advantages", "--through", "advantages", "--name", "adv"
    )
    assert "advantages of iteration 0" in told
    assert ledger_of("adv").find(ledger_of("adv").at(0, "train")) is None
    assert manifest("adv", 0, "advantages").content_digest == manifest("small", 0, "advantages").content_digest


def test_verify_finds_every_step_equal_and_keeps_nothing(home: Path, rollbook: Callable[..., str]) -> None:
    before = sorted(path.name for path in (home / "store").iterdir())
    told = json.loads(rollbook("rerun", "small", "--iteration", "1", "--from", "generate", "--verify", "--json"))
    assert told["passed"] and [s["step"] for s in told["steps"]] == list(STEPS)
    assert all(s["outcome"] == "equal" and s["recorded"] == s["again"] for s in told["steps"])
    assert sorted(path.name for path in (home / "store").iterdir()) == before


def test_verify_names_the_first_row_and_column_that_differ(home: Path, rollbook: Callable[..., str]) -> None:
    """A reward of iteration 0 is altered, with its digests: only making it again can tell."""
    from data.columns import VOLATILE
    from data.digest import TableDigest, file_digest, json_digest

    recorded = manifest("small", 0, "score")
    path = Path(recorded.uri.removeprefix("file://"))
    entry = recorded.files[0]
    file = Path(entry.uri.removeprefix("file://"))
    kept = path.read_bytes(), file.read_bytes()
    table = read_table(ledger_of().store, recorded)
    rewards = table["reward"].to_pylist()
    rewards[3] += 0.25
    altered = table.set_column(
        table.schema.get_field_index("reward"), table.schema.field("reward"), pa.array(rewards, pa.float32())
    )
    try:
        pq.write_table(altered, file)
        digest = TableDigest(VOLATILE["rewards"])
        digest.update(altered)
        changed = entry.model_copy(update={"sha256": file_digest(file), "bytes": file.stat().st_size})
        content = json_digest({"rewards": digest.hexdigest()})
        path.write_bytes(
            recorded.model_copy(update={"files": (changed,), "content_digest": content}).to_bytes(ledger_of().store.url)
        )
        said = rollbook("rerun", "small", "--iteration", "0", "--through", "score", "--verify", "--json", code=1)
        told = json.loads(said)["steps"][0]
        assert not told["passed"]
        assert told["columns"] == [
            {"column": "reward", "rows": 1, "first": table["trajectory_id"][3].as_py(), "largest": 0.25}
        ]
    finally:
        path.write_bytes(kept[0])
        file.write_bytes(kept[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--set", "sampling.temperature=0.5", "--from", "advantages"],
            "generate reads it, which is before --from advantages",
        ),
        (["--set", "model.path=/models/x"], "training begins with it"),
        (["--from", "trian"], "--from 'trian': is no step"),
        ([], "nothing is changed; give --set a.b=c, or --from STEP"),
        (["--from", "train", "--through", "score"], "it comes before"),
        (["--set", "run=other", "--set", "advantage.lam=0.5"], "a fork is named with --name"),
        (["--from", "train", "--verify", "--set", "advantage.lam=0.5"], "leave out --set"),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_anything_starts(
    rollbook: Callable[..., str], arguments: list[str], words: str
) -> None:
    assert words in rollbook("rerun", "small", "--iteration", "1", *arguments, code=1).replace("\n", " ")


def test_an_iteration_that_is_not_there_is_named(rollbook: Callable[..., str]) -> None:
    for command in (["rerun", "--from", "train"], ["rerun", "--verify"], ["sweep", "--grid", "advantage.lam=0.5,1.0"]):
        said = rollbook(command[0], "small", "--iteration", "9", *command[1:], code=1)
        assert "iteration 9 of 'small': not on record; it has 0 to 2" in said.replace("\n", " ")


def test_sweep_makes_what_variants_share_once(home: Path, rollbook: Callable[..., str], tmp_path: Path) -> None:
    grid = ["--grid", "advantage.lam=0.9,1.0", "--grid", "train.optimizer.lr=1e-4,2e-4"]
    told = json.loads(
        rollbook("sweep", "small", "--iteration", "2", *grid, "--plot", str(tmp_path / "p.png"), "--json")
    )
    assert [v["settings"] for v in told["variants"]] == [
        {"advantage.lam": lam, "train.optimizer.lr": lr} for lam in ("0.9", "1.0") for lr in ("1e-4", "2e-4")
    ]
    advantages = [v["manifests"]["advantages"] for v in told["variants"]]
    assert advantages[0] == advantages[1] != advantages[2] == advantages[3]
    assert len(list((home / "store/shared/advantages").iterdir())) == 2
    # lam 1 and lr 2e-4 are what the run was made with: the same state, to the bit.
    uri = told["variants"][3]["manifests"]["train"]
    assert ledger_of().open(uri).content_digest == manifest("small", 2, "train").content_digest
    assert len({v["metrics"]["grad_norm"] for v in told["variants"]}) == 4
    above, parts = mlflow_runs("sweep", "small"), mlflow_runs("sweep-part", "small")
    assert len(above) == 1 and {part.data.tags["mlflow.parentRunId"] for part in parts} == {above[0].info.run_id}
    assert sorted(tuple(sorted(part.data.params.items())) for part in parts) == [
        (("advantage.lam", lam), ("train.optimizer.lr", lr)) for lam in ("0.9", "1.0") for lr in ("1e-4", "2e-4")
    ]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    made = files(home, "shared")
    rollbook("sweep", "small", "--iteration", "2", *grid)
    assert files(home, "shared") == made and len(mlflow_runs("sweep", "small")) == 1
    assert "MLflow has small: 3 iterations" in rollbook("sync-tracking", "small")  # a sweep is no iteration


def test_sweep_refuses_what_changes_rollouts(rollbook: Callable[..., str]) -> None:
    said = rollbook("sweep", "small", "--iteration", "2", "--grid", "sampling.temperature=0.5,1.0", code=1)
    assert "a sweep shares stored rollouts" in said.replace("\n", " ")


def test_rescore_counts_failures_and_leaves_the_old(home: Path, rollbook: Callable[..., str], tmp_path: Path) -> None:
    """The other scorer doubles the reward, and fails on the first of 32 answers."""
    rollouts = read_table(ledger_of().store, manifest("small", 1, "generate"), ["metadata"])
    first = json.loads(rollouts["metadata"][0].as_py())["prompt_id"]
    (tmp_path / "twice.py").write_text(TWICE.format(first=first))
    before = files(home, "small")
    said = rollbook("rescore", "small", "--scorer", f"{tmp_path}/twice.py:score", "--iterations", "1:3", "--json")
    told = json.loads(said)["iterations"]
    assert [row["iteration"] for row in told] == [1, 2] and files(home, "small") == before
    old = read_table(ledger_of().store, manifest("small", 1, "score"))["reward"].to_numpy()
    assert told[0]["metrics"]["reward/failed_after"] == 1.0 and told[0]["metrics"]["reward/failed_before"] == 0.0
    assert told[0]["metrics"]["reward/before"] == pytest.approx(old.mean())
    assert told[0]["metrics"]["reward/after"] == pytest.approx(2.0 * old[1:].mean())
    assert told[0]["metrics"]["reward/changed"] == pytest.approx((old[1:] != 0).mean())
