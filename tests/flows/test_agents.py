"""Runs with an environment, pipelined and partial at once, by the command a user types: real parts, a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.config import PromptsConfig
from data.ledger import Ledger
from data.manifest import Manifest
from data.prompts import load_source
from data.store import Store
from data.tables import read_table
from tests.flows.chaos import Running, require_equal
from tests.models.environments.test_worlds import HOSTILE

ITERATIONS = 3
CONFIG = """
run = "ahead"
iterations = 3
pipelined = true
prompts = {{ source = "{folder}/train.jsonl", held_out = "{folder}/held_out.jsonl", {drawn} }}
sampling = {{ max_new_tokens = 6, stop = {stop} }}
environment = {{ kind = "{hostile}:Hostile", options.log = "{folder}/log", max_turns = 3, in_flight = 4 }}
partial.groups = 5
reward.scorer = "{folder}/length.py:score"
advantage = {{ estimator = "group" }}
critic.kind = "none"
train = {{ mini_batch = 3, optimizer.lr = 1e-3 }}
evaluate.problems = 4
tracking.traces = 1.0
"""
SCORER = "def score(response, metadata):\n    return float(len(response))\n"
# Calls of a tool in the first two turns; one turn; a failure between turns, before the first one; three turns.
ACTS = [{"step 1": "call", "step 2": "call"}, {"step 1": "done"}, {"step 2": "raise"}, {"reset": "raise"}, {}]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy ends its turns at any of many letters."""
    folder = tmp_path_factory.mktemp("agents")
    for part in ("train", "held_out"):
        rows = [{"prompt": f"say {i}", "metadata": {"acts": acts, "answer": "7"}} for i, acts in enumerate(ACTS * 2)]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(told) + "\n" for told in rows))
    (folder / "length.py").write_text(SCORER)
    letters, drawn = (
        json.dumps(list("abcdefghijklmnopqrstuvwxyz0123456789")),
        "per_iteration = 3, samples_per_prompt = 2",
    )
    (folder / "ahead.toml").write_text(CONFIG.format(folder=folder, hostile=HOSTILE, stop=letters, drawn=drawn))
    return folder / "ahead.toml"


def ledger_of(home: Path, run: str = "ahead") -> Ledger:
    return Ledger(Store(f"file://{home}/store"), run)


def manifest(ledger: Ledger, iteration: int, step: str) -> Manifest:
    found = ledger.find(ledger.at(iteration, step))
    assert found is not None, (iteration, step)
    return found


@pytest.fixture(scope="module")
def ahead(home: Path, config: Path) -> Ledger:
    from typer.testing import CliRunner

    from flows import cli

    done = CliRunner().invoke(cli.app, ["run", str(config)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return ledger_of(home)


def test_rollouts_are_by_the_policy_that_the_iteration_before_began_with(ahead: Ledger) -> None:
    """Iterations 0 and 1 sample with the first policy, iteration k with what iteration k - 2 published."""
    base = manifest(ahead, 0, "publish").inputs["base"]
    assert len({base, *(manifest(ahead, k, "publish").content_digest for k in range(ITERATIONS))}) == 1 + ITERATIONS
    for k in range(ITERATIONS):
        made, newest = (
            manifest(ahead, k, "generate"),
            base if k < 2 else manifest(ahead, k - 2, "publish").content_digest,
        )
        assert made.inputs["policy"] == newest
        rows = read_table(ahead.store, made).to_pylist()
        spoken = [turn for found in rows for turn in found["turns"] if turn["is_generated"]]
        assert newest in {turn["policy_digest"] for turn in spoken}
        assert {turn["policy_version"] for turn in spoken} <= {0} | ({2} if k == 2 else set())
        assert made.metrics["partial/submitted"] == 10
    assert manifest(ahead, ITERATIONS - 1, "train").inputs["rollouts"] == manifest(ahead, 2, "generate").content_digest


def test_c31_a_failed_trajectory_is_no_zero(ahead: Ledger) -> None:
    failed = 0
    for k in range(ITERATIONS):
        rollouts = read_table(ahead.store, manifest(ahead, k, "generate")).to_pylist()
        rewards = read_table(ahead.store, manifest(ahead, k, "score")).to_pylist()
        advantages = read_table(ahead.store, manifest(ahead, k, "advantages")).to_pylist()
        for played, scored, weighed in zip(rollouts, rewards, advantages, strict=True):
            if played["status"] != "failed":
                continue
            assert scored["status"] == "failed" and scored["reward"] != scored["reward"]
            assert weighed["advantage"] == 0.0 and not any(weighed["loss_mask"])
            failed += 1
    assert failed


def test_every_kind_of_trajectory_can_be_looked_at(ahead: Ledger, rollbook: Callable[..., str], tmp_path: Path) -> None:
    rows = [
        (k, found) for k in range(3) for found in read_table(ahead.store, manifest(ahead, k, "generate")).to_pylist()
    ]
    kinds = {
        "calls": next(r for r in rows if any(turn["tool_calls"] for turn in r[1]["turns"])),
        "never began": next(r for r in rows if r[1]["status"] == "failed" and len(r[1]["turns"]) == 1),
        "went on": next(r for r in rows if r[1]["trajectory_id"] in _carried(ahead, r[0] - 1)),
    }
    for kind, (k, found) in kinds.items():
        said = rollbook("show", "ahead", "--iteration", str(k), "--trajectory", found["trajectory_id"])
        assert found["trajectory_id"] in said
        if kind == "calls":
            assert "calls add, reward 0.5" in said and "46" in said
        if kind == "never began":
            assert "ValueError: fell over" in said
    for k in range(ITERATIONS):
        assert (
            "fell over" in rollbook("show", "ahead", "--iteration", str(k), "--failed") or k != kinds["never began"][0]
        )
        page = tmp_path / f"{k}.html"
        rollbook("report", "ahead", str(page), "--iteration", str(k))
        assert all(name in page.read_text() for i, found in rows if i == k for name in [found["root_id"]])
    assert json.loads(rollbook("show", "ahead", "--json"))["run"] == "ahead"
    assert "fell over" in rollbook("query", "ahead", "select error from rollouts where status = 'failed'")


def _carried(ledger: Ledger, k: int) -> set[str]:
    if k < 0:
        return set()
    return set(read_table(ledger.store, manifest(ledger, k, "generate"), name="carry")["trajectory_id"].to_pylist())


def test_traces_are_of_all_kinds(ahead: Ledger, home: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    [experiment] = [e.experiment_id for e in client.search_experiments() if client.search_runs(
        [e.experiment_id], "tags.`rollbook.run` = 'ahead'")]  # fmt: skip
    found = client.search_traces(locations=[experiment], filter_string="tags.`rollbook.run` = 'ahead'", max_results=500)
    assert {trace.info.tags["rollbook.status"] for trace in found} >= {"ok", "failed"}
    assert any(span.span_type == "TOOL" for trace in found for span in trace.data.spans)


def test_on_record_it_is_not_done_again(ahead: Ledger, rollbook: Callable[..., str], config: Path) -> None:
    said = rollbook("run", str(config), "--dry-run")
    assert "not on record" not in said
    assert "every step is on record" in rollbook("run", str(config))


@pytest.mark.slow
def test_results_do_not_depend_on_what_ran_beside_what(
    ahead: Ledger, home: Path, rollbook: Callable[..., str], config: Path
) -> None:
    """One more iteration at a time: nothing is ever generated ahead."""
    for iterations in range(1, ITERATIONS + 1):
        rollbook("run", str(config), "--set", "run=behind", "--set", f"iterations={iterations}")
    require_equal(ledger_of(home, "behind"), ahead, ITERATIONS)


@pytest.mark.slow
def test_an_iteration_is_repeated_and_forked(ahead: Ledger, home: Path, rollbook: Callable[..., str]) -> None:
    for first in ("generate", "advantages"):
        rollbook("rerun", "ahead", "--iteration", "1", "--from", first, "--verify")
    rollbook(
        "rerun", "ahead", "--iteration", "1", "--set", "train.optimizer.lr=5e-4", "--name", "other", "--continue", "1"
    )
    other = ledger_of(home, "other")
    assert manifest(other, 1, "train").content_digest != manifest(ahead, 1, "train").content_digest
    # Iteration 2 is by the policy that iteration 1 began with, which is the parent's; so are its rollouts the same.
    assert manifest(other, 2, "generate").content_digest == manifest(ahead, 2, "generate").content_digest
    rollbook("rerun", "ahead", "--iteration", "1", "--set", "environment.max_turns=2", "--name", "shorter")
    assert manifest(ledger_of(home, "shorter"), 1, "generate").inputs == manifest(ahead, 1, "generate").inputs


@pytest.mark.slow
def test_c21_killed_wherever_it_is_it_ends_alike(ahead: Ledger, desk: Callable[[str], Any], config: Path) -> None:
    """The driver in the first iteration, while the second one's rollouts are made or done; then the engine."""
    mine = desk("ahead-killed")
    with Running(mine, ["run", str(config), "--set", "run=ahead"]) as running:
        running.until(running.manifest(0, "score").exists)
        running.restart()
        running.until(running.manifest(1, "score").exists)
        running.part("engine").kill()
        running.finish()
    require_equal(ledger_of(mine.folder / ".rollbook"), ahead, ITERATIONS)


@pytest.mark.slow
def test_rollouts_that_cannot_be_made_ahead_cost_the_iteration_nothing(
    home: Path, rollbook: Callable[..., str], config: Path, tmp_path: Path
) -> None:
    """Iteration 1's prompts fail until they are let go: iteration 0 is on record by then, and the same command ends."""
    told = [json.loads(line) for line in (config.parent / "train.jsonl").read_text().splitlines()]
    found = load_source(PromptsConfig(source=str(config.parent / "train.jsonl")))
    failing = {prompt.messages[-1]["content"] for prompt in found.take(3, 3, 0)}
    for prompt in told:
        prompt["metadata"]["acts"] = {"reset": "raise until let go"} if prompt["prompt"] in failing else {}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in told))
    text = config.read_text().replace(f"{config.parent}/train", f"{tmp_path}/train").replace("partial.groups = 5\n", "")
    (tmp_path / "broken.toml").write_text(text.replace(f"{config.parent}/log", f"{tmp_path}/log"))
    command = ["run", str(tmp_path / "broken.toml"), "--set", "run=broken"]
    said = rollbook(*command, code=1)
    assert "all 6 trajectories failed, the first one by: ValueError: not yet; nothing can be learned" in said
    ledger = ledger_of(home, "broken")
    digest = manifest(ledger, 0, "publish").content_digest
    assert ledger.find(ledger.at(1, "generate")) is None
    (tmp_path / "let go").touch()
    rollbook(*command)
    assert manifest(ledger, 0, "publish").content_digest == digest
    assert manifest(ledger, ITERATIONS - 1, "publish").policy_version > 0
