"""Which prompts a generate step takes, and what their trajectories are called."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.config import PromptsConfig
from data.manifest import ManifestError
from data.prompts import load_source
from flows.config import load
from infra import handover
from tasks.generate import Draw, _generate, _roots
from tasks.step import BrokenPromise
from tests.recorder import SORT
from tests.tasks.conftest import Bench


def test_c32_no_two_draws_share_a_root(tmp_path: Path) -> None:
    """Three prompts, drawn 4, 4 and 2 at a time: each comes round again and again, under a root of its own."""
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"say {i}", "metadata": {"answer": str(i)}}) + "\n" for i in range(3))
    )
    held_out = tmp_path / "h.jsonl"
    held_out.write_text(json.dumps({"prompt": "say 9", "metadata": {"answer": "9"}}) + "\n")
    source = load_source(PromptsConfig(source=str(file), held_out=str(held_out)))
    drawn = [
        pair for start, count in ((0, 4), (4, 4), (8, 2)) for pair in _roots(source, Draw("train", start, count), 7)
    ]
    roots, prompts = [root for root, _ in drawn], [prompt.prompt_id for _, prompt in drawn]
    assert len(set(roots)) == 10 and len(set(prompts)) == 3
    assert [root.partition("@")[0] for root in roots] == prompts  # a root says whose it is
    assert sorted(prompts.count(p) for p in set(prompts)) == [3, 3, 4]  # whole rounds, then a part of one
    again = _roots(source, Draw("train", 4, 4), 7)
    assert again == drawn[4:8]  # the same draw, whoever asks, is the same


def test_evaluation_roots_are_positions_in_the_held_out_set(tmp_path: Path) -> None:
    source = load_source(PromptsConfig(source="sort"))
    roots = [root for root, _ in _roots(source, Draw("eval", 0, 5), 0)]
    assert [root.rpartition("@")[2] for root in roots] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("spoiled", ["a weight", "the length", "config.json"])
def test_an_altered_policy_is_refused_and_its_file_named(bench: Bench, tmp_path: Path, spoiled: str) -> None:
    """Its weights are hashed by the engine that reads them, not before."""
    from models.engines.transformers import TransformersEngine
    from models.toy import write_toy
    from models.weights import read_tensors, tensors_digest

    write_toy(tmp_path / "toy")
    digest = tensors_digest(read_tensors(tmp_path / "toy"))
    attempt = bench.job("publish", "policy", {}).attempt()
    attempt.add_folder(tmp_path / "toy")
    policy = attempt.commit(content_digest=digest, facts={"policy_version": 0})
    job, engine = bench.job("generate", "rollouts", {"policy": policy}), TransformersEngine(4, 1)

    def serve(folder: Path) -> str | None:
        engine.update_weights(folder, 0, digest)
        return engine.policy_digest

    assert job.load(policy, serve) == digest
    name = "config.json" if spoiled == "config.json" else "model.safetensors"
    file = job.folder("policy") / name
    data = file.read_bytes()
    file.write_bytes(data[:-1] if spoiled == "the length" else data[:-1] + bytes([data[-1] ^ 1]))
    words = f"{len(data) - 1} bytes" if spoiled == "the length" else "sha256"
    engine = TransformersEngine(4, 1)
    with pytest.raises(ManifestError, match=f"{name}: altered: {words}"):
        job.load(policy, serve)
    assert engine.policy_digest is None


def test_rollouts_wait_for_the_policy_that_was_handed_over(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are in memory, and its record is not there: nothing is entered. Once it is, the rollouts are."""
    from models.engines.transformers import TransformersEngine
    from models.toy import write_toy
    from models.weights import read_tensors, tensors_digest

    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(handover, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr("tasks.step.PROMISE_S", 0.1)
    folder = handover.place(1)
    assert folder is not None
    write_toy(folder)
    digest = tensors_digest(read_tensors(folder))
    publish = bench.job("publish", "policy", {})
    attempt = publish.attempt()
    attempt.add_folder(folder)
    handover.offer(folder, digest)
    known = bench.rollouts(["a"])  # any manifest, to make the promise of
    uri = bench.ledger.store.url_of(publish.address.manifest)
    promised = known.model_copy(update={"uri": uri, "content_digest": digest, "files": ()})
    address = bench.ledger.at(1, "generate")
    job = replace(bench.job("generate", "rollouts", {"policy": promised}), address=address)
    config = load(SORT, ["prompts.per_iteration=2"]).generation
    arguments = (TransformersEngine(4, 1), job, Draw("train", 0, 2), config, None, 0, True)
    with pytest.raises(BrokenPromise, match="not on record"):
        _generate(*arguments)
    assert bench.ledger.find(address) is None
    policy = attempt.commit(content_digest=digest, facts={"policy_version": 0})
    made = _generate(*arguments)
    assert bench.ledger.find(address) == made and made.input_uris == {"policy": policy.uri}
