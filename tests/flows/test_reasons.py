"""`why`: the fields that would make a recorded step run again, on a run whose ledger and keys are real."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data.ledger import Fork, Ledger
from flows.config import RunConfig, load
from flows.reasons import Change, Reasons, reasons
from flows.training import evaluate_policy
from infra.home import Home
from tests.recorder import record_run

SORT = Path(__file__).parents[2] / "flows/configs/sort.toml"
SCORER = "def score(response, metadata):\n    return {reward}\n"
Ask = Callable[..., Reasons]


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SCORER.format(reward=1))
    return file


@pytest.fixture
def config(scorer: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    base = [f"resources.store=file://{tmp_path}/store", "iterations=2", f"reward.scorer={scorer}:score", "run=asked"]

    def build(*overrides: str) -> RunConfig:
        return load(SORT, [*base, *overrides])

    return build


@pytest.fixture
def ledger(config: Callable[..., RunConfig]) -> Ledger:
    """Two iterations, and the evaluation after them."""
    made, home = config(), Home.find()
    run, head = record_run(made, home, 2)
    evaluate_policy(made, run, 2, head)
    return run.ledger


@pytest.fixture
def ask(config: Callable[..., RunConfig], ledger: Ledger) -> Ask:
    """Of iteration 1; a field with both values, as text."""

    def call(step: str, *overrides: str, iteration: int = 1) -> Reasons:
        return reasons(ledger, config(*overrides), iteration, step)

    return call


def own(found: Reasons) -> list[str]:
    return [str(field) for field in found.own]


def above(found: Reasons) -> list[tuple[str, int | None, list[str]]]:
    return [(change.step, change.iteration, [str(field) for field in change.fields]) for change in found.above]


def test_nothing_changed(ask: Ask, ledger: Ledger) -> None:
    for step in ("generate", "score", "replay", "advantages", "train", "publish"):
        recorded = ledger.find(ledger.at(1, step))
        assert recorded is not None
        assert ask(step) == Reasons(step, 1, recorded.key, (), ())
    assert ask("train", "resources.threads=7", "checkpoint.every=5").own == ()  # of execution, in no key


def test_an_own_field_and_the_steps_before_it(ask: Ask) -> None:
    """lam is read by advantages of both iterations; the second's is made, among others, of what the first's was."""
    change = ["config.advantage.lam was 1.0, now 0.5"]
    assert own(ask("advantages", "advantage.lam=0.5")) == change
    assert above(ask("advantages", "advantage.lam=0.5")) == [("advantages", 0, change)]
    assert own(ask("train", "advantage.lam=0.5")) == []
    assert above(ask("train", "advantage.lam=0.5")) == [("advantages", 0, change), ("advantages", 1, change)]
    assert ask("generate", "advantage.lam=0.5", iteration=0) == ask("generate", iteration=0)


def test_user_code_as_it_is_on_disk(ask: Ask, scorer: Path) -> None:
    scorer.write_text(SCORER.format(reward=2))
    (line,) = own(ask("score", iteration=0))
    assert line.startswith("user_code.scorer was ")
    assert [(step, k) for step, k, _ in above(ask("advantages"))] == [("score", 0), ("score", 1)]


def test_seeds_versions_and_evaluations(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own(ask("replay", "seed=9"))[0].startswith("seed was ")
    (line,) = own(ask("evaluate_greedy", "seed=9", iteration=2))
    assert line.startswith("seed was ")
    assert own(ask("score_greedy", "reward.timeout_s=3", iteration=2)) == ["config.reward.timeout_s was 10.0, now 3.0"]
    from dataclasses import replace

    from tasks import replay

    monkeypatch.setattr(replay, "STEP", replace(replay.STEP, version=2))
    assert own(ask("replay")) == ["step_version was 1, now 2"]


def test_what_the_run_began_with(ask: Ask) -> None:
    """Another warm start, or none at all: then the first rollouts are of another policy."""
    (change,) = ask("score", "warm_start.steps=7", iteration=0).above
    assert (change.step, change.iteration) == ("warm_start", None)
    assert [field.name for field in change.fields] == ["config.warm_start.steps"]
    (line,) = own(ask("generate", "warm_start.steps=0", iteration=0))
    assert line.startswith("inputs.policy was ")


def test_not_on_record_and_before_a_fork(ask: Ask, ledger: Ledger, config: Callable[..., RunConfig]) -> None:
    assert ask("score", iteration=5) == Reasons("score", 5, None, (), ())
    branch = Ledger(ledger.store, "branch")
    forked = config("run=branch", "reward.timeout_s=3")
    branch.open_or_create(forked, Fork(run="asked", iteration=1, step="score"))
    before = reasons(branch, forked, 1, "generate")
    assert before.key is not None and not before.own and not before.above
    assert reasons(branch, forked, 1, "score").key is None


def test_a_step_that_does_not_exist(ask: Ask) -> None:
    with pytest.raises(LookupError, match="step 'scare': an iteration has generate, score"):
        ask("scare")


def test_as_json(ask: Ask) -> None:
    found = ask("advantages", "advantage.lam=0.5", iteration=0).as_json()
    assert found["fields"] == [{"name": "config.advantage.lam", "recorded": "1.0", "now": "0.5"}]
    assert (found["step"], found["iteration"], found["above"]) == ("advantages", 0, [])
    assert Change("score", 1, ()).as_json() == {"step": "score", "iteration": 1, "fields": []}
