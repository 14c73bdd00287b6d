"""SGLang on the CPU: syncs that go wrong are caught, its death is survived, its complaints are told. `-m sglang`."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from data.config import EngineConfig
from models.engines.contract import Request, SamplingParams
from models.engines.sglang import proof
from models.engines.sglang.backend import BackendLost
from models.engines.sglang.embedded import Embedded
from models.engines.sglang.engine import SGLangEngine
from models.weights import WeightsMismatch, read_tensors, tensors_digest, write_tensors

pytestmark = pytest.mark.sglang
PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, eos_ids=(2,))
ASKED = [Request(f"p@{i}/0", np.arange(i + 1, dtype=np.int32), seed=i) for i in range(12)]


@pytest.fixture
def engine(engine_of, sharp_toy) -> SGLangEngine:
    """It serves the sharp toy as version 3, before and after each test."""
    made = engine_of("sglang")
    before = made.policy_digest
    yield made
    made.update_weights(sharp_toy, 3, before)


def backend_of(engine: SGLangEngine) -> Embedded:
    return engine._replicas._replicas[0]._backend


@pytest.fixture
def small_step(sharp_toy, tmp_path) -> tuple[Path, str]:
    """The next policy, a millionth away from the one served: no log-prob in bf16 would tell them apart."""
    shutil.copytree(sharp_toy, tmp_path / "next")
    tensors = {name: tensor * (1 + 1e-6) for name, tensor in read_tensors(sharp_toy).items()}
    return tmp_path / "next", write_tensors(tmp_path / "next", tensors)


def altered(folder: Path, target: Path, **tensors: torch.Tensor) -> Path:
    shutil.copytree(folder, target)
    write_tensors(target, read_tensors(folder) | {name.replace("__", "."): t for name, t in tensors.items()})
    return target


def corrupted(folder: Path, target: Path) -> Path:
    """One bit of one value of one tensor."""
    norm = read_tensors(folder)["model.norm.weight"].clone()
    norm.view(torch.int32)[17] ^= 1
    return altered(folder, target, model__norm__weight=norm)


def without_second_shard(folder: Path, target: Path) -> Path:
    """As if the second of two files had not been read."""
    shutil.copytree(folder, target)
    names = sorted(tensors := read_tensors(folder))
    write_tensors(target, {name: tensors[name] for name in names[: len(names) // 2]})
    return target


def in_bf16(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    write_tensors(target, {name: tensor.bfloat16() for name, tensor in read_tensors(folder).items()})
    return target


@pytest.mark.parametrize("fault", [corrupted, without_second_shard, in_bf16])
def test_c25_weights_that_arrive_altered_are_caught(engine, small_step, tmp_path, monkeypatch, fault):
    """SGLang is given other files than were asked for, and says that all went well."""
    folder, digest = small_step
    backend = backend_of(engine)
    load, wrong = backend.load_folder, fault(folder, tmp_path / "wrong")
    monkeypatch.setattr(backend, "load_folder", lambda path, tag: load(wrong if path == folder else path, tag))
    assert_refused_and_restored(engine, folder, digest, r"parameters are not those of digest \w{64}, first model")


def test_c25_tensors_that_arrive_altered_are_caught(engine, small_step, monkeypatch):
    folder, digest = small_step
    backend = backend_of(engine)
    load, norm = backend.load_tensors, {"model.norm.weight": torch.full((96,), 1.001)}
    monkeypatch.setattr(backend, "load_tensors", lambda tensors, *more: load({**tensors, **norm}, *more))
    before = engine.policy_digest
    with pytest.raises(WeightsMismatch, match=r"1 parameters are not those of digest .*, first model.norm.weight;"):
        engine.update_weights(folder, 4, digest, in_memory=True)
    assert engine.policy_digest == before


def test_c25_a_sync_that_did_not_happen_is_caught(engine, small_step, sharp_toy, monkeypatch):
    folder, digest = small_step
    backend = backend_of(engine)
    load = backend.load_folder
    monkeypatch.setattr(backend, "load_folder", lambda path, tag: None if path == folder else load(path, tag))
    assert_refused_and_restored(engine, folder, digest, "it says that it serves '.*', not '.*'")


def test_c25_old_weights_under_the_new_version_are_caught(engine, small_step, sharp_toy, monkeypatch):
    folder, digest = small_step
    backend = backend_of(engine)
    load = backend.load_folder
    monkeypatch.setattr(backend, "load_folder", lambda path, tag: load(sharp_toy, tag))
    assert_refused_and_restored(engine, folder, digest, "parameters are not those of digest")


def test_c25_right_weights_used_in_the_wrong_way_are_caught(engine, small_step, monkeypatch):
    """Checksums agree; what it computes does not: here by a temperature that SGLang applies on its own."""
    folder, digest = small_step
    probe = proof.probes
    monkeypatch.setattr("models.engines.sglang.wire.probe", lambda name, ids, n: warmer(name, ids, n))
    with pytest.raises(WeightsMismatch, match=r"its log-probs are .* away from those of the same weights"):
        engine.update_weights(folder, 4, digest)
    monkeypatch.undo()
    assert probe(512) == proof.probes(512)


def warmer(name, ids, tokens):
    from models.engines.sglang.backend import Asked

    return Asked(name, list(ids), {"temperature": 1.5, "max_new_tokens": tokens, "ignore_eos": True})


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        (
            {"value_head__weight": torch.zeros(1, 96)},
            r"value_head.weight has shape \(1, 96\) where the model's is none",
        ),
        # The toy's head is tied to its embedding: another one has no place.
        ({"lm_head__weight": torch.ones(512, 96)}, r"lm_head.weight has shape \(512, 96\) where the model's is none"),
        ({"model__norm__weight": torch.full((96,), torch.nan)}, "model.norm.weight is not finite"),
    ],
    ids=["value head", "tied head", "NaN"],
)
def test_c25_an_export_that_is_no_policy_is_refused(engine, sharp_toy, tmp_path, extra, error):
    folder = altered(sharp_toy, tmp_path / "odd", **extra)
    assert_refused_and_restored(engine, folder, tensors_digest(read_tensors(folder)), error)


def assert_refused_and_restored(engine, folder, digest, error) -> None:
    before = engine.policy_digest
    with pytest.raises(WeightsMismatch, match=error):
        engine.update_weights(folder, 4, digest)
    assert engine.policy_digest == before
    assert {(c.policy_version, c.policy_digest) for c in engine.generate(ASKED, PLAIN)} == {(3, before)}


def test_a_prefix_of_the_old_weights_is_not_used(engine, small_step, sharp_toy, tmp_path, monkeypatch):
    """The probes' prompts are in the prefix cache; a sync that does not flush it gives log-probs of a mixture."""
    shutil.copytree(sharp_toy, tmp_path / "far")
    tensors = {name: t * 0.5 if t.ndim == 2 else t for name, t in read_tensors(sharp_toy).items()}
    digest = write_tensors(tmp_path / "far", tensors)
    manager = backend_of(engine)._manager
    update = manager.update_weights_from_disk

    def without_flush(ask, request):
        ask.flush_cache = False
        return update(ask, request)

    monkeypatch.setattr(manager, "update_weights_from_disk", without_flush)
    with pytest.raises(WeightsMismatch, match="its log-probs are"):
        engine.update_weights(tmp_path / "far", 4, digest)
    monkeypatch.undo()
    engine.update_weights(tmp_path / "far", 4, digest)


@pytest.mark.parametrize("how", [{}, {"in_memory": True}], ids=str)
def test_an_update_of_a_millionth_arrives(engine, small_step, how, monkeypatch):
    """Hashed here unless the trainer, which handed it over, has just done so; proven each time."""
    folder, digest = small_step
    hashed = []
    monkeypatch.setattr(proof, "tensors_digest", lambda tensors: hashed.append(1) or tensors_digest(tensors))
    engine.update_weights(folder, 4, digest, **how)
    assert len(hashed) == (not how)
    assert {(c.policy_version, c.policy_digest) for c in engine.generate(ASKED, PLAIN)} == {(4, digest)}


def test_a_late_answer_ends_the_call_and_not_the_engine(engine, monkeypatch):
    """A call that cannot end in time is an error; the next one is fine."""
    monkeypatch.setattr("models.engines.sglang.replicas.ATTEMPTS", 1)
    monkeypatch.setattr(engine._replicas, "_config", EngineConfig(kind="sglang", batch=32, timeout_s=0.05))
    long = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=480, eos_ids=())
    with pytest.raises(BackendLost, match=r"12 of 12 answers took longer than engine.timeout_s = 0.05 s; raise it"):
        engine.generate(ASKED, long)
    monkeypatch.undo()
    assert len(engine.generate(ASKED, PLAIN)) == len(ASKED)


def test_its_death_is_survived_and_no_trajectory_is_lost_or_doubled(engine):
    scheduler = [c for c in psutil.Process().children(recursive=True) if c.name() == "sglang::scheduler"]
    assert len(scheduler) == 1
    os.kill(scheduler[0].pid, signal.SIGKILL)
    completions = engine.generate(ASKED, PLAIN)
    assert [c.trajectory_id for c in completions] == [request.trajectory_id for request in ASKED]
    assert not scheduler[0].is_running()


def test_arguments_that_it_does_not_know_are_named(engine, sharp_toy):
    other = SGLangEngine(EngineConfig(kind="sglang", arguments={"nonsense": 1}), 2)
    with pytest.raises(ValueError, match=r"engine.arguments: SGLang .* does not take them \(.*nonsense.*\)"):
        other.update_weights(sharp_toy, 3, engine.policy_digest)
