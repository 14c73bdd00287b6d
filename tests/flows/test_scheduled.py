"""Deployments of a run on a real Prefect server with a real worker, and their flows in this process."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.ledger import Ledger, RunConflict
from data.store import Store
from data.summary import summarize
from flows import scheduled, session
from infra.ray_session import Fleet
from tests.flows.conftest import SharedFleet
from tests.scheduling import Prefect, await_true, serving

TRAIN, PRUNE = "continue-training/small", "prune-run/small"


def published(desk: Any) -> int:
    """How many iterations of the small run have a policy."""
    ledger = desk.ledger
    return sum(ledger.find(ledger.at(k, "publish")) is not None for k in ledger.iterations())


@pytest.fixture(scope="module")
def own(desk: Callable[..., Any], finished: tuple[Any, str]) -> Any:
    """A copy of the finished run on another desk: three iterations, the states after the last two kept."""
    mine = desk("scheduled")
    shutil.copytree(finished[0].folder / ".rollbook/store", mine.folder / ".rollbook/store")
    return mine


@pytest.fixture(scope="module")
def prefect(own: Any) -> Iterator[Prefect]:
    with serving(own) as running:
        own.rollbook("deploy", "small", "--more", "2", "--cron", "30 1 1 1 *", "--timezone", "Europe/Berlin")
        yield running


def test_a_flow_runs_under_a_worker(own: Any, prefect: Prefect) -> None:
    """A third state, beside the two that the config keeps, is pruned."""
    states = own.folder / ".rollbook/store/small/checkpoints"
    shutil.copytree(states / "000001", states / "000000")
    copied = states / "000000/manifest.json"
    copied.write_text(copied.read_text().replace("checkpoints/000001", "checkpoints/000000"))
    assert prefect.wait(prefect.start(PRUNE)) == ("Completed", "")
    assert not (states / "000000/manifest.json").exists() and (states / "000001/manifest.json").exists()

    unknown, wrong = prefect.asked_for(TRAIN, mor=1), prefect.asked_for(TRAIN, more=0)
    assert unknown["refused"] == 409 and "'mor' was unexpected" in unknown["said"]
    assert wrong["refused"] == 409 and "less than the minimum of 1" in wrong["said"]


@pytest.mark.slow
def test_deploying_again_makes_nothing_new(own: Any, prefect: Prefect) -> None:
    before = prefect.deployment(TRAIN)
    said = own.rollbook("deploy", "small", "--more", "2", "--cron", "30 1 1 1 *", "--timezone", "Europe/Berlin")
    train = prefect.deployment(TRAIN)
    assert train["id"] == before["id"] and f"/deployments/deployment/{train['id']}" in said
    (schedule,) = train["schedules"]
    assert schedule["schedule"]["cron"] == "30 1 1 1 *" and schedule["schedule"]["timezone"] == "Europe/Berlin"
    assert train["parameters"]["more"] == 2 and train["global_concurrency_limit"]["limit"] == 1
    assert len(prefect.ask("POST", "/deployments/filter", {})) == 5
    assert len(prefect.ask("POST", "/automations/filter", {})) == 1


@pytest.mark.slow
def test_deploy_says_what_is_wrong(own: Any, prefect: Prefect) -> None:
    del prefect
    assert "did you mean 'small'?" in own.rollbook("deploy", "smal", code=1)
    assert "cron 'nightly'" in own.rollbook("deploy", "small", "--cron", "nightly", code=1)
    (own.folder / "lost.toml").write_text('run = "lost"\nprompts.source = "lost.jsonl"\nwarm_start.steps = 0\n')
    assert "lost.jsonl" in own.rollbook("deploy", "lost.toml", code=1)


@pytest.mark.slow
def test_a_run_goes_on_by_its_deployment(own: Any, prefect: Prefect) -> None:
    """2 more; the newest policy is evaluated by the train flow itself, so the evaluation finds it on record."""
    before = published(own)
    assert prefect.wait(prefect.start(TRAIN)) == ("Completed", "")
    assert published(own) == before + 2
    evaluation = prefect.start("evaluate-run/small")
    assert prefect.wait(evaluation) == ("Completed", "")
    assert prefect.task_runs(evaluation, "evaluate_sampled") == []
    rescore = prefect.start("rescore-run/small", scorer="number", iterations="0:2")
    assert prefect.wait(rescore) == ("Completed", "")
    assert prefect.task_runs(rescore, "rescore-0") == prefect.task_runs(rescore, "rescore-1") == ["Completed"]


@pytest.mark.slow
def test_overlap_cancel_and_the_run_after(own: Any, prefect: Prefect) -> None:
    before = published(own)
    running = prefect.start(TRAIN, more=500)
    await_true(lambda: published(own) > before, 150, lambda: prefect.state(running))
    overlapping = prefect.start(TRAIN, more=1)
    assert prefect.wait(overlapping) == ("Cancelled", "Deployment concurrency limit reached.")
    family = psutil.Process(_driver(own)).children(recursive=True)
    assert any(one.name().startswith("ray::") for one in family)
    command = [str(Path(sys.executable).parent / "prefect"), "flow-run", "cancel", running]
    subprocess.run(command, check=True, env=own.environment | {"PREFECT_API_URL": prefect.api}, capture_output=True)
    assert prefect.wait(running, within_s=60)[0] == "Cancelled"
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    reached = published(own)
    assert reached < before + 500
    assert prefect.wait(prefect.start(TRAIN, more=1)) == ("Completed", "")
    assert published(own) == reached + 1


def _driver(own: Any) -> int:
    return json.loads((own.folder / ".rollbook/runs/small/driver.json").read_text())["pid"]


@pytest.mark.slow
def test_a_killed_flow_run_is_reported_and_its_retry_does_the_rest(own: Any, prefect: Prefect) -> None:
    """8 more, killed after at least 2: the retry goes on to the same end, and only the one cut off is begun twice."""
    before = published(own)
    flow_run = prefect.start(TRAIN, more=8)
    await_true(lambda: published(own) >= before + 2, 150, lambda: prefect.state(flow_run))
    os.kill(_driver(own), signal.SIGKILL)
    assert prefect.wait(flow_run)[0] == "Crashed"
    failures = own.folder / ".rollbook/failures.log"
    await_true(lambda: failures.exists() and flow_run in failures.read_text(), 60)
    assert "continue-small Crashed: Process exited with status code: -9" in failures.read_text()
    reached = published(own)
    prefect.ask("POST", f"/flow_runs/{flow_run}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}})
    await_true(lambda: prefect.state(flow_run)[0] != "Crashed", 30)
    assert prefect.wait(flow_run) == ("Completed", "")
    assert published(own) == before + 8
    for k in range(before, reached):
        assert len(prefect.task_runs(flow_run, f"iteration-{k}")) == 1
    again = [k for k in range(before, before + 8) if len(prefect.task_runs(flow_run, f"iteration-{k}")) > 1]
    assert again in ([], [reached])


@pytest.mark.slow
def test_a_cron_fires_for_a_run_that_a_file_begins(own: Any, prefect: Prefect) -> None:
    """Relative paths in the file are those of the folder in which `deploy` was called."""
    (own.folder / "long.py").write_text("def score(response, metadata):\n    return len(response) / 10\n")
    (own.folder / "ask.txt").write_text("".join(f"Say {i}\n" for i in range(20)))
    (own.folder / "cron.toml").write_text(
        'run = "cron"\nprompts.source = "ask.txt"\nprompts.per_iteration = 8\ntrain.mini_batch = 8\n'
        'reward.scorer = "long.py:score"\nsampling.max_new_tokens = 4\nevaluate.problems = 0\n'
        'advantage.estimator = "gae"\ncritic.kind = "shared"\n'
    )
    own.rollbook("deploy", "cron.toml", "--cron", "* * * * *")
    name = "continue-training/cron"
    await_true(lambda: "Completed" in [r["state_name"] for r in prefect.flow_runs(name)], 240)
    own.rollbook("deploy", "cron.toml", "--remove")
    first = Ledger(Store(f"file://{own.folder}/.rollbook/store"), "cron")
    assert first.iterations()[0] == 0 and first.find(first.at(0, "publish")) is not None
    assert prefect.deployment(name)["refused"] == 404
    assert {d["name"] for d in prefect.ask("POST", "/deployments/filter", {})} == {"small", "rollbook"}


@pytest.mark.slow
def test_a_policy_waits_for_a_person(own: Any, prefect: Prefect) -> None:
    """Of 2 iterations the first is published, since the second samples from it; nothing is left running meanwhile."""
    before = published(own)
    asking = prefect.start(TRAIN, more=2, approve=True)
    assert prefect.wait(asking)[0] == "Suspended"
    assert published(own) == before + 1
    await_true(lambda: not (own.folder / ".rollbook/runs/small/driver.json").exists(), 30)
    other = prefect.start(TRAIN, more=2, approve=True)
    assert f"waits for approval in flow run {asking}" in prefect.wait(other)[1]
    refused = prefect.ask("POST", f"/flow_runs/{asking}/resume", {})
    assert refused["status"] == "REJECT"
    prefect.ask("POST", f"/flow_runs/{asking}/resume", {"run_input": {"publish": False, "why": "too long"}})
    _, why = prefect.wait(asking, "Failed")
    assert f"iteration {before + 1} of 'small' is not to be published: too long" in why
    assert published(own) == before + 1

    again = prefect.start(TRAIN, more=2, approve=True)  # asks anew, for the same policy
    assert prefect.wait(again)[0] == "Suspended"
    prefect.ask("POST", f"/flow_runs/{again}/resume", {"run_input": {"publish": True, "why": ""}})
    assert prefect.wait(again, "Completed", "Failed") == ("Completed", "")
    assert published(own) == before + 2


@pytest.mark.slow
def test_an_unknown_parameter_is_refused_at_the_start_where_the_server_let_it_through(
    own: Any, prefect: Prefect
) -> None:
    before = published(own)
    deployment = prefect.deployment(TRAIN)["id"]
    assert prefect.ask("PATCH", f"/deployments/{deployment}", {"enforce_parameter_schema": False}) is None
    flow_run = prefect.start(TRAIN, mor=1)
    assert prefect.wait(flow_run)[0] in ("Failed", "Crashed")
    prefect.ask("PATCH", f"/deployments/{deployment}", {"enforce_parameter_schema": True})
    logs = prefect.ask("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run]}}})
    assert any("was provided with parameters" in line["message"] and "'mor'" in line["message"] for line in logs)
    assert published(own) == before


@pytest.fixture
def here(
    finished: tuple[Any, str], fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Ledger]:
    """The finished run in a home of this process, with residents that tests share."""
    shutil.copytree(finished[0].folder / ".rollbook/store", tmp_path / "store")
    monkeypatch.setenv("ROLLBOOK_HOME", str(tmp_path))
    SharedFleet.shared = fleet
    monkeypatch.setattr(session, "Fleet", SharedFleet)
    return lambda run: Ledger(Store(f"file://{tmp_path}/store"), run)


def test_continue_training_adds_to_what_is_on_record(here: Callable[[str], Ledger]) -> None:
    """3 iterations and 1 more."""
    scheduled.continue_training.fn("small", more=1)
    ledger = here("small")
    assert ledger.find(ledger.at(3, "publish")) and not ledger.find(ledger.at(4, "generate"))
    assert summarize(ledger).done == 4


def test_a_file_that_no_longer_fits_the_record_is_refused(here: Callable[[str], Ledger], tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('run = "small"\nseed = 7\n')
    with pytest.raises(RunConflict, match="seed"):
        scheduled.continue_training.fn("small", config=str(tmp_path / "other.toml"))
    assert summarize(here("small")).done == 3
