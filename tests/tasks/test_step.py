"""The memo: a step on record is not run again; another request at its place is refused; a plan runs nothing."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.ledger import STEPS, Ledger
from data.manifest import Manifest
from data.memory import OutOfMemory
from data.request import Request, StepConflict
from data.store import Store
from infra.ray_session import Fleet, Role, WorkerLost
from tasks.step import BrokenPromise, Job, Note, Pending, Run, Step, perform

STEP = Step("double", version=1, kind="numbers")


class Nothing:
    pass


def write(resource: Nothing, job: Job, text: str) -> Manifest:
    """Leaves a mark for every time it ran, then commits one file."""
    marks = Path(job.cache)
    marks.mkdir(exist_ok=True)
    (marks / f"ran-{len(list(marks.iterdir()))}").touch()
    file = marks / "made.txt"
    file.write_text(text)
    attempt = job.attempt()
    attempt.add_file("made.txt", file)
    file.unlink()
    return attempt.commit(metrics={"length": len(text)})


def lose(resource: Nothing, job: Job, text: str) -> Manifest:
    import os

    os._exit(1)


def need_more(resource: Nothing, job: Job, text: str) -> Manifest:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nProcess 1 has 70 GiB.")


@pytest.fixture
def run(tmp_path: Path, fleet: Fleet) -> Run:
    role = Role("hand", Nothing)
    ledger = Ledger(Store(str(tmp_path / "store")), "memo")
    return Run("memo", 0, ledger, fleet, tmp_path / "marks", role, role, role, execution={"threads": 2})


def times_run(run: Run) -> int:
    return len(list(run.cache.glob("ran-*")))


def ask(run: Run, text: str = "abc", step: Step = STEP, body: Callable[..., Manifest] = write, **changes: Any) -> Any:
    request: dict[str, Any] = {"iteration": 0, "inputs": {}, "config": {"text": text}, "seed": 1} | changes
    return perform(run, step, role=run.worker, body=body, args=(text,), **request)


def test_on_record_is_not_run_again(run: Run) -> None:
    first, second = ask(run), ask(run)
    assert first == second and times_run(run) == 1
    assert first.metrics == {"length": 3.0} and first.execution == {"threads": 2}
    assert [(n.recorded, n.reason) for n in run.notes] == [(False, "not on record"), (True, "on record")]


def test_execution_settings_do_not_matter(run: Run) -> None:
    assert ask(run) == ask(replace(run, execution={"threads": 7})) and times_run(run) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": "abd"}, ["config.text", '"abc"', '"abd"']),
        ({"seed": 2}, ["seed", "1", "2"]),
        ({"step": Step("double", 2, "numbers")}, ["step_version", "1", "2"]),
        ({"inputs": {"prompts": "d1"}}, ["inputs.prompts", "not set", "d1"]),
    ],
)
def test_another_request_at_its_place_is_refused(run: Run, changes: dict[str, Any], words: list[str]) -> None:
    ask(run)
    with pytest.raises(StepConflict) as caught:
        ask(run, **changes)
    for word in [*words, "never overwritten", "--set run=NAME"]:
        assert word in str(caught.value)
    assert times_run(run) == 1


def test_plan_runs_nothing_and_says_why(run: Run) -> None:
    planned = replace(run, planning=True)
    first = ask(planned)
    assert first == Pending("double", 0)
    assert ask(planned, step=Step("next", 1, "numbers"), inputs={"numbers": first}) == Pending("next", 0)
    assert [n.reason for n in run.notes] == ["not on record", "its input numbers is not on record"]
    assert times_run(run) == 0


def test_shared_things_lie_under_their_key(run: Run) -> None:
    made = ask(run, iteration=None)
    assert made.run is None and made.uri.endswith(f"/shared/numbers/{made.key}/manifest.json")
    other = replace(run, name="other", ledger=Ledger(run.ledger.store, "other"))
    assert ask(other, iteration=None) == made and times_run(run) == 1


def test_lost_worker_is_told_as_such_and_the_step_can_be_done(run: Run) -> None:
    with pytest.raises(WorkerLost):
        ask(run, body=lose)
    assert ask(run).metrics == {"length": 3.0}


def test_a_gpu_without_room_gives_one_error_with_the_settings_that_help(run: Run) -> None:
    said = r"double: CUDA out of memory. Tried to allocate 2.00 GiB.; .* lower engine.memory .* train.micro_tokens"
    with pytest.raises(OutOfMemory, match=said):
        ask(run, body=need_more)
    assert ask(run).metrics["length"] == 3


def test_watchers_hear_of_every_step(run: Run) -> None:
    heard: list[str] = []
    ask(replace(run, watchers=[lambda note: heard.append(note.step)]))
    assert heard == ["double"]


def test_watchers_are_told_one_thing_at_a_time(run: Run) -> None:
    """Steps may run beside each other; a watcher, as the one that claims the run, need not know."""
    inside, overlaps = [0], []

    def watch(note: Note) -> None:
        inside[0] += 1
        time.sleep(0.02)
        overlaps.append(inside[0])
        inside[0] -= 1

    watched = replace(run, watchers=[watch])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: watched.note(Note("double", i, True, "")), range(8)))
    assert overlaps == [1] * 8


def taker(run: Run, promised: Manifest) -> Job:
    request = Request("take", 1, "numbers", {"numbers": promised})
    return Job(run.ledger, run.ledger.at(1, "take"), request, run.cache)


def test_what_was_promised_is_waited_for(run: Run) -> None:
    made = ask(run)
    later = run.ledger.at(2, "double")
    promised = made.model_copy(update={"uri": run.ledger.store.url_of(later.manifest), "files": ()})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(taker(run, promised).recorded, "numbers")
        time.sleep(0.2)
        assert not waiting.done()
        again = ask(run, iteration=2)
        assert waiting.result(timeout=30) == again and again.files
    assert taker(run, made).recorded("numbers") is made


def test_a_broken_promise_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ask(run)
    other = made.model_copy(update={"files": (), "content_digest": "f" * 64})
    with pytest.raises(
        BrokenPromise, match=rf"has digest {made.content_digest[:16]}, this take .* with ffffffffffffffff"
    ):
        taker(run, other).recorded("numbers")
    monkeypatch.setattr("tasks.step.PROMISE_S", 0.1)
    absent = made.model_copy(update={"files": (), "uri": f"{made.uri}-not"})
    with pytest.raises(BrokenPromise, match="not on record after 0 s; the same command goes on"):
        taker(run, absent).recorded("numbers")


def test_only_the_last_iteration_ends_early(run: Run) -> None:
    """Through train of iteration 2: earlier ones publish, and every resident is needed for them."""
    run.only_through("train", 2)
    assert run.given("publish", 1) is None and run.given("train", 2) is None
    assert run.given("publish", 2) == Pending("publish", 2)
    assert run.steps == STEPS
    run.only_through("score", 0)  # nothing comes before the first iteration
    assert run.steps == ("generate", "score")
