"""The step memo: equal keys give the recorded result, others a named conflict; a race or a kill never leaves a half."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data.config import AdvantageConfig, EvaluateConfig, OptimizerConfig, PromptsConfig
from data.ledger import Ledger, Request, RunConflict, StepConflict, list_runs, read_table
from data.manifest import Manifest, ManifestError
from data.schema import SchemaError
from data.sections import Section, execution
from data.store import Store
from tests.data.places import everywhere, locally_and_on_s3

Build = Callable[..., Request]


class TrainingConfig(Section):
    """A config as flows make one: nested sections, some fields of execution."""

    run: str = "sort"
    iterations: int = 3
    advantage: AdvantageConfig = AdvantageConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    prompts: PromptsConfig = PromptsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    threads: int = execution(2)


def record(ledger: Ledger, request: Request, table: pa.Table, iteration: int = 0) -> Manifest:
    attempt = ledger.writer(ledger.at(iteration, request.step), request)
    attempt.add_table("rollouts", table)
    return attempt.commit(metrics={"reward": 0.5}, facts={"cursor": 128})


# Resolving


@everywhere
def test_a_request_is_made_once(ledger: Ledger, request_of: Build, rollouts: pa.Table, store: Store):
    address = ledger.at(4, "generate")
    assert ledger.resolve(address, request_of()) is None
    made = record(ledger, request_of(), rollouts, 4)
    assert ledger.resolve(address, request_of()) == made
    assert ledger.find(address) == made
    assert made.uri == f"{store.url}/sort/000004/generate/manifest.json"
    assert made.files[0].uri.startswith(f"{store.url}/sort/000004/generate/")
    assert (made.run, made.iteration, made.metrics, made.facts) == ("sort", 4, {"reward": 0.5}, {"cursor": 128})
    assert made.inputs == {"policy": "d0"}
    assert made.packages["pyarrow"] == pa.__version__


def test_execution_is_recorded_but_no_part_of_the_key(ledger: Ledger, request_of: Build, rollouts: pa.Table):
    made = record(ledger, request_of(execution={"threads": 2}), rollouts)
    assert made.execution == {"threads": 2}
    assert ledger.resolve(ledger.at(0, "generate"), request_of(execution={"threads": 8})) == made


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"step_version": 2}, "other step_version: step_version was 1, now 2"),
    "input": ({"inputs": {"policy": "d1"}}, 'other inputs: inputs.policy was "d0", now "d1"'),
    "more inputs": ({"inputs": {"policy": "d0", "ref": "r"}}, 'inputs.ref was not set, now "r"'),
    "no input": ({"inputs": {}}, 'inputs.policy was "d0", now not set'),
    "config": (
        {"config": {"sampling": {"temperature": 0.5, "top_k": 0}}},
        "other config: config.sampling.temperature was 1.0, now 0.5",
    ),
    "config unset": ({"config": {"sampling": {"temperature": 1.0}}}, "config.sampling.top_k was 0, now not set"),
    "null is not unset": (
        {"config": {"sampling": {"temperature": 1.0, "top_k": None}}},
        "config.sampling.top_k was 0, now null",
    ),
    "seed": ({"seed": 8}, "other seed: seed was 7, now 8"),
    "code": ({"user_code": {"scorer": "x"}}, 'other user_code: user_code.scorer was not set, now "x"'),
    "first of two": ({"seed": 8, "inputs": {"policy": "d1"}}, "other inputs: inputs.policy"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_request_conflicts_and_names_the_field(
    change: str, ledger: Ledger, request_of: Build, rollouts: pa.Table
):
    made = record(ledger, request_of(), rollouts)
    parts, message = CHANGES[change]
    asked = request_of(**parts)
    assert asked.key != made.key
    with pytest.raises(StepConflict) as raised:
        ledger.resolve(ledger.at(0, "generate"), asked)
    text = str(raised.value)
    assert text.startswith(f"step 'generate' at {made.uri} is on record with")
    assert message in text
    assert "pick a new run name with --set run=NAME" in text
    assert str(pickle.loads(pickle.dumps(raised.value))) == text  # it crosses Ray


def test_the_order_of_names_is_no_part_of_the_key(request_of: Build):
    one, two = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert request_of(config=one).key == request_of(config=two).key


def test_the_key_is_worked_by_hand(request_of: Build):
    text = (
        '{"config":{"sampling":{"temperature":1.0,"top_k":0}},"inputs":{"policy":"d0"},"seed":7,'
        '"step":"generate","step_version":1,"user_code":{}}'
    )
    assert request_of().key == hashlib.sha256(text.encode()).hexdigest()


def test_an_input_manifest_counts_by_its_content(ledger: Ledger, request_of: Build, rollouts: pa.Table):
    made = record(ledger, request_of(), rollouts)
    request = request_of(step="score", inputs={"rollouts": made})
    assert request.key == request_of(step="score", inputs={"rollouts": made.content_digest}).key
    assert request.input_uris == {"rollouts": made.uri}
    elsewhere = made.model_copy(update={"uri": "s3://other/manifest.json", "files": ()})
    assert request_of(step="score", inputs={"rollouts": elsewhere}).key == request.key


@everywhere
def test_shared_things_lie_under_their_key(ledger: Ledger, request_of: Build, store: Store, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    request = request_of(step="import_model", kind="model")
    attempt = ledger.writer(ledger.shared(request), request)
    attempt.add_folder(tmp_path / "model")
    made = attempt.commit(content_digest="weights")
    assert made.uri == f"{store.url}/shared/model/{request.key}/manifest.json"
    assert (made.run, made.iteration, made.content_digest) == (None, None, "weights")
    other_run = Ledger(store, "other")
    assert other_run.resolve(other_run.shared(request), request) == made
    assert (store.local_copy(made.files, tmp_path) / "config.json").read_text() == "{}"


@everywhere
def test_of_several_results_each_is_found_by_its_key(ledger: Ledger, request_of: Build, rollouts: pa.Table):
    """The first has the step's place; another lies beside it; both are steps of the iteration."""
    first, other = request_of(step="evaluate"), request_of(step="evaluate", seed=8)
    assert ledger.among(3, other) == ledger.among(3, first) == ledger.at(3, "evaluate")
    made = record(ledger, first, rollouts, 3)
    place = ledger.among(3, other)
    assert place.path == f"sort/000003/evaluate-{other.key[:12]}" and ledger.resolve(place, other) is None
    beside = ledger.writer(place, other).commit(content_digest="beside")
    assert [ledger.resolve(ledger.among(3, request), request) for request in (first, other)] == [made, beside]
    assert ledger.steps(3) == [made, beside]


def test_an_empty_folder_is_refused(ledger: Ledger, request_of: Build, tmp_path: Path):
    with pytest.raises(ValueError, match="no files to record"):
        ledger.writer(ledger.at(0, "publish"), request_of()).add_folder(tmp_path / "nowhere")


# Content


@locally_and_on_s3
def test_the_content_digest_does_not_know_shards_or_time(
    ledger: Ledger, request_of: Build, many_rollouts: Callable[[int], pa.Table]
):
    table = many_rollouts(3)
    whole = record(ledger, request_of(), table)
    attempt = ledger.writer(ledger.at(1, "generate"), request_of())
    late = table.set_column(table.schema.get_field_index("latency_ms"), "latency_ms", pa.array([9.0] * 6))
    for start in (0, 2, 4):
        attempt.add_table("rollouts", late.slice(start, 2))
    assert attempt.commit().content_digest == whole.content_digest
    assert record(ledger, request_of(), table.slice(2), 2).content_digest != whole.content_digest


@locally_and_on_s3
def test_files_and_tables_both_enter_the_content_digest(
    ledger: Ledger, request_of: Build, rollouts: pa.Table, tmp_path: Path
):
    digests = set()
    for iteration, (text, table) in enumerate((("a", rollouts), ("b", rollouts), ("a", rollouts.slice(2)))):
        (tmp_path / "f").write_text(text)
        attempt = ledger.writer(ledger.at(iteration, "generate"), request_of())
        attempt.add_table("rollouts", table)
        attempt.add_file("plan.json", tmp_path / "f")
        digests.add(attempt.commit().content_digest)
    assert len(digests) == 3


def test_a_root_in_two_shards_is_refused(ledger: Ledger, request_of: Build, rollouts: pa.Table):
    attempt = ledger.writer(ledger.at(0, "generate"), request_of())
    attempt.add_table("rollouts", rollouts.slice(0, 3))
    with pytest.raises(SchemaError, match="root B has rows in two shards; a shard holds whole groups"):
        attempt.add_table("rollouts", rollouts.slice(3))


def test_a_broken_table_is_refused_before_anything_is_written(
    ledger: Ledger, request_of: Build, rollouts: pa.Table, store: Store
):
    attempt = ledger.writer(ledger.at(0, "generate"), request_of())
    with pytest.raises(SchemaError, match="later than the current one, 2"):
        attempt.add_table("rollouts", rollouts, policy_version=2)
    assert store.list_dirs() == []


def test_the_steps_own_seconds(ledger: Ledger, request_of: Build):
    attempt = ledger.writer(ledger.at(0, "publish"), request_of())
    attempt.started -= 5.0
    assert attempt.commit().seconds >= 5.0
    assert ledger.writer(ledger.at(1, "publish"), request_of()).commit(seconds=2.5).seconds == 2.5


@locally_and_on_s3
def test_a_metric_that_is_nan_survives_in_valid_json(ledger: Ledger, request_of: Build, store: Store):
    made = ledger.writer(ledger.at(0, "score"), request_of()).commit(metrics={"reward": float("nan"), "max": -1.5})
    found = ledger.find(ledger.at(0, "score"))
    assert found is not None
    assert repr(found.metrics) == "{'reward': nan, 'max': -1.5}"
    assert found.created_at == made.created_at
    json.loads(store.read_bytes("sort/000000/score/manifest.json"), parse_constant=pytest.fail)


def test_a_store_may_be_moved(ledger: Ledger, request_of: Build, rollouts: pa.Table, tmp_path: Path):
    record(ledger, request_of(), rollouts)
    shutil.move(tmp_path / "store", tmp_path / "elsewhere")
    moved = Ledger(Store(str(tmp_path / "elsewhere")), "sort")
    found = moved.resolve(moved.at(0, "generate"), request_of())
    assert found is not None
    assert read_table(moved.store, found).equals(rollouts)


def test_an_altered_manifest_is_named(ledger: Ledger, request_of: Build, rollouts: pa.Table, tmp_path: Path):
    record(ledger, request_of(), rollouts)
    file = tmp_path / "store" / "sort" / "000000" / "generate" / "manifest.json"
    text = file.read_text()
    for broken in (text[:100], "[]", text.replace('"seed": 7', '"seed": "many"')):
        file.write_text(broken)
        with pytest.raises(ManifestError, match=r"generate/manifest.json: not a manifest of this version"):
            ledger.find(ledger.at(0, "generate"))


@everywhere
def test_other_bytes_at_an_address_are_refused(ledger: Ledger, request_of: Build, rollouts: pa.Table, store: Store):
    """C23"""
    made = record(ledger, request_of(), rollouts)
    with pytest.raises(StepConflict, match="seed was 7, now 8"):
        record(ledger, request_of(seed=8), rollouts.slice(2))
    assert ledger.find(ledger.at(0, "generate")) == made
    assert read_table(store, made).equals(rollouts)


# Runs


@locally_and_on_s3
def test_a_run_is_opened_again_with_the_same_settings(ledger: Ledger):
    first = ledger.open_or_create(TrainingConfig())
    assert first.config["threads"] == 2
    assert "threads" not in first.semantic
    assert ledger.open_or_create(TrainingConfig()) == first


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 9},
        {"iterations": 1},
        {"threads": 64},
        {"run": "sort"},
        {"evaluate": EvaluateConfig(problems=9, every=2, samples=4)},
    ],
)
def test_a_run_may_grow_shrink_or_run_and_be_evaluated_otherwise(change: dict[str, Any], ledger: Ledger):
    first = ledger.open_or_create(TrainingConfig())
    assert ledger.open_or_create(TrainingConfig(**change)) == first


@locally_and_on_s3
def test_other_settings_conflict_and_are_all_named(ledger: Ledger):
    ledger.open_or_create(TrainingConfig())
    other = TrainingConfig(advantage=AdvantageConfig(lam=0.9), optimizer=OptimizerConfig(betas=[0.9, 0.999]))
    with pytest.raises(RunConflict) as raised:
        ledger.open_or_create(other)
    assert str(raised.value) == (
        "run 'sort' is on record with other settings: advantage.lam was 0.95, now 0.9; "
        "optimizer.betas was [0.9, 0.95], now [0.9, 0.999]. "
        "Pick a new name with --set run=NAME, or go back to the recorded values"
    )


def test_a_section_without_change_in_it_does_not_conflict_over_unset(ledger: Ledger):
    ledger.open_or_create(TrainingConfig())
    with pytest.raises(RunConflict, match=r"prompts.digits was null, now 6"):
        ledger.open_or_create(TrainingConfig(prompts=PromptsConfig(digits=6)))


@pytest.mark.parametrize("name", ["shared", "", "a/b", "..", ".hidden", "-x", "a b", "x" * 101])
def test_a_name_that_cannot_be_a_folder_is_refused(name: str, store: Store):
    with pytest.raises(ValueError, match=r"run name .*: use 1 to 100 letters"):
        Ledger(store, name)


@everywhere
def test_runs_are_listed_newest_first(store: Store, request_of: Build):
    for name in ("b", "c", "a"):
        Ledger(store, name).open_or_create(TrainingConfig(run=name))
    store.create("stray/file", b"")
    store.create("shared/model/k/manifest.json", b"")
    assert [record.run for record in list_runs(store)] == ["a", "c", "b"]
    store.create("broken/run.json", b"{}")
    with pytest.raises(ManifestError, match=r"broken/run.json: not a run record"):
        list_runs(store)


@everywhere
def test_iterations_and_steps_are_listed(ledger: Ledger, request_of: Build, rollouts: pa.Table, tmp_path: Path):
    assert ledger.iterations() == []
    for iteration in (10, 2):
        record(ledger, request_of(step="publish"), rollouts, iteration)
        record(ledger, request_of(step="evaluate"), rollouts, iteration)
    ledger.writer(ledger.at(2, "train"), request_of(step="train")).add_table("rollouts", rollouts)  # not committed
    assert ledger.iterations() == [2, 10]
    assert [manifest.step for manifest in ledger.steps(2)] == ["publish", "evaluate"]
    assert ledger.steps(3) == []


@everywhere
def test_everything_that_crosses_ray_pickles(ledger: Ledger, request_of: Build, rollouts: pa.Table):
    made = record(ledger, request_of(), rollouts)
    address, request = ledger.at(1, "score"), request_of(inputs={"rollouts": made})
    attempt = ledger.writer(address, request)
    for thing in (ledger, address, request, made, attempt):
        assert pickle.loads(pickle.dumps(thing)) == thing
    assert len(pickle.dumps((ledger, address, request))) < 64 * 1024


def test_an_unwritable_store_is_one_clear_error(request_of: Build, tmp_path: Path):
    (tmp_path / "file").write_text("")
    ledger = Ledger(Store(str(tmp_path / "file")), "sort")
    with pytest.raises(OSError, match=r"sort/run.json cannot be written .*set resources.store"):
        ledger.open_or_create(TrainingConfig())
