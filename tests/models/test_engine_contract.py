"""What every rollout engine owes, whichever it is: one table of tests for all. SGLang's part runs with `-m sglang`."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from data.config import EngineConfig
from models.engines.contract import (
    GREEDY,
    SAMPLED,
    SCALED,
    NotReady,
    PromptTooLong,
    Request,
)
from models.tokenizer import Tokenizer
from models.weights import WeightsMismatch, read_tensors, tensors_digest, write_tensors
from tasks.roles import make_engine
from tests.models.slow_engine import MANY_EOS, PLAIN, kept, plain_logits, requests, scaled_probs

SEMANTICS = {"transformers": SAMPLED, "sglang": SCALED}
BOTH = ["transformers", pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.fixture(scope="module", params=BOTH)
def engine(request, engine_of) -> Any:
    """One of each kind, whose weights every test leaves as it found them."""
    return engine_of(request.param)


@pytest.fixture(scope="module")
def folder(sharp_toy) -> Path:
    return sharp_toy


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def assert_logprobs(engine, model, asked, completions, params) -> None:
    """Each log-prob is, of the distribution that the engine names, that of a plain pass; each token one it may draw."""
    for request, completion in zip(asked, completions, strict=True):
        assert completion.trajectory_id == request.trajectory_id
        assert (completion.logprobs.dtype, completion.token_ids.dtype) == (np.float32, np.int32)
        assert (completion.logprobs <= 0).all()
        scaled = scaled_probs(model, request, completion, params)
        for probs, token, logprob in zip(scaled, completion.token_ids, completion.logprobs, strict=True):
            allowed = kept(probs, params, joint=engine.name == "sglang")
            assert token in allowed
            whole = params.greedy or engine.logprob_semantics(params) == SCALED
            assert logprob == pytest.approx(np.log(probs[token] / (1.0 if whole else probs[allowed].sum())), abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.6},
        {"temperature": 0.0},
        {"eos_ids": MANY_EOS, "max_new_tokens": 30},
    ],
    ids=str,
)
def test_logprobs_are_those_of_a_plain_forward_pass(engine, model, changes):
    params = replace(PLAIN, **changes)
    asked = requests()
    assert_logprobs(engine, model, asked, engine.generate(asked, params), params)


def test_greedy_takes_the_argmax_of_every_step(engine, model):
    asked = requests(8)
    for request, completion in zip(asked, engine.generate(asked, replace(PLAIN, temperature=0.0)), strict=True):
        assert completion.token_ids.tolist() == plain_logits(model, request, completion).argmax(-1).tolist()


def test_semantics_are_named(engine):
    assert engine.logprob_semantics(replace(PLAIN, top_p=0.8)) == SEMANTICS[engine.name]
    assert engine.logprob_semantics(replace(PLAIN, temperature=0.0)) == GREEDY


def test_answers_end_at_the_first_eos_or_at_the_limit(engine):
    eos = (*MANY_EOS, 2)  # the model's own, which its config names, ends an answer in SGLang whatever we ask
    completions = engine.generate(requests(), replace(PLAIN, eos_ids=eos, max_new_tokens=12))
    for completion in completions:
        ends = np.isin(completion.token_ids, eos)
        if completion.finish_reason == "stop":
            assert ends[-1] and not ends[:-1].any()
        else:
            assert not ends.any() and len(completion.token_ids) == 12
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_stop_strings_end_an_answer_with_the_token_that_completes_them(engine, folder):
    """Also one that is spread over tokens: the toy's digits have a token each."""
    text, stop = Tokenizer(folder).decode, ("e", "12", "7")
    completions = engine.generate(requests(), replace(PLAIN, stop=stop, max_new_tokens=40))
    reasons = set()
    for completion in completions:
        whole, before = text(completion.token_ids.tolist()), text(completion.token_ids[:-1].tolist())
        assert not any(string in before for string in stop)
        eos = completion.token_ids[-1] == 2
        assert (completion.finish_reason == "stop") == (eos or any(string in whole for string in stop))
        reasons.add((completion.finish_reason, bool(eos)))
    assert ("stop", False) in reasons


def test_without_an_eos_nothing_ends_an_answer(engine):
    """Token 2 is the model's own eos, and among the 40 answers of 60 tokens some would have it."""
    completions = engine.generate(requests(), replace(PLAIN, eos_ids=(), max_new_tokens=60))
    assert {len(completion.token_ids) for completion in completions} == {60}
    assert any(2 in completion.token_ids for completion in completions)


def test_the_context_limits_the_answer(engine, model):
    params = replace(PLAIN, eos_ids=())
    asked = [Request(f"{n}", np.arange(n, dtype=np.int32) % 512, seed=n) for n in (511, 508, 2)]
    completions = engine.generate(asked, params)
    # 512 positions: 511 leave one, 508 leave four, 2 leave more than the nine allowed.
    assert [len(completion.token_ids) for completion in completions] == [1, 4, 9]
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert_logprobs(engine, model, asked, completions, params)


def test_siblings_of_a_prompt_differ(engine):
    prompt = np.array([1, 2, 3], np.int32)
    drawn = engine.generate([Request(f"p@0/{n}", prompt, n) for n in range(20)], PLAIN)
    assert [c.trajectory_id for c in drawn] == [f"p@0/{n}" for n in range(20)]
    assert len({tuple(completion.token_ids.tolist()) for completion in drawn}) > 15


def test_first_tokens_follow_the_models_distribution(engine, model):
    prompt = np.array([1, 345, 22, 26, 2], np.int32)
    count = 4000
    params = replace(PLAIN, temperature=0.6, top_k=12, max_new_tokens=1, eos_ids=())
    drawn = engine.generate([Request(str(seed), prompt, seed) for seed in range(count)], params)
    with torch.no_grad():
        logits = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].double()
    values, tokens = (logits / 0.6).topk(12)
    expected = count * values.softmax(0).numpy()
    assert expected.min() > 5
    counts = np.bincount([c.token_ids[0] for c in drawn], minlength=512)[tokens.numpy()]
    assert counts.sum() == count
    # Pearson's chi-square with 11 degrees of freedom: .999 quantile 31.26.
    assert ((counts - expected) ** 2 / expected).sum() < 31.26


def test_completions_and_health_carry_the_policy(engine, folder):
    digest = tensors_digest(read_tensors(folder))
    completion = engine.generate(requests(1), PLAIN)[0]
    assert (completion.policy_version, completion.policy_digest) == (3, digest)
    health = engine.health()
    assert (health.ready, health.policy_version, health.policy_digest, health.context) == (True, 3, digest, 512)


def test_bad_requests_are_refused_before_anything_is_generated(engine):
    fine = Request("fine", np.array([1], np.int32), 0)
    long = Request("q@7/0", np.zeros(512, np.int32), 0)
    with pytest.raises(
        PromptTooLong, match=r"q@7/0: the prompt has 512 tokens, the model's context 512; .* at most 511"
    ):
        engine.generate([fine, long], PLAIN)
    with pytest.raises(ValueError, match="trajectory e: an empty prompt; it needs at least one token"):
        engine.generate([fine, Request("e", np.zeros(0, np.int32), 0)], PLAIN)
    with pytest.raises(ValueError, match=r"trajectory v: token id 512; ids must be in \[0, 512\)"):
        engine.generate([fine, Request("v", np.array([3, 512], np.int32), 0)], PLAIN)
    with pytest.raises(ValueError, match=r"trajectory n: token id -1"):
        engine.generate([fine, Request("n", np.array([-1], np.int32), 0)], PLAIN)
    with pytest.raises(ValueError, match=r"trajectory s: seed -1; it must be in \[0, 2\^64\)"):
        engine.generate([fine, Request("s", np.array([1], np.int32), -1)], PLAIN)
    empty = make_engine(EngineConfig(kind=engine.name), 2, text=True)
    assert (empty.health().ready, empty.policy_digest) == (False, None)
    with pytest.raises(NotReady, match="no weights yet; call update_weights first"):
        empty.generate([fine], PLAIN)


def test_no_requests_give_no_completions(engine):
    assert engine.generate([], PLAIN) == []


def test_weights_served_already_only_change_their_version(engine, folder, tmp_path):
    engine.update_weights(tmp_path / "nowhere", 9, engine.policy_digest)
    assert engine.health().policy_version == engine.generate(requests(1), PLAIN)[0].policy_version == 9
    engine.update_weights(folder, 3, engine.policy_digest)


def test_new_weights_serve_and_later_changes_of_the_file_do_not_reach_them(engine, folder, tmp_path):
    old = engine.policy_digest
    digest = publish(folder, tmp_path / "new")
    engine.update_weights(tmp_path / "new", 4, digest)
    asked, params = requests(5), replace(PLAIN, temperature=0.0)
    new = engine.generate(asked, params)
    assert {(c.policy_version, c.policy_digest) for c in new} == {(4, digest)}
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32, attn_implementation="eager")
    assert_logprobs(engine, other, asked, new, params)
    path = tmp_path / "new/model.safetensors"
    with path.open("r+b") as file:  # in place: the file may be mapped by the engine
        file.seek(path.stat().st_size // 2)
        file.write(b"\0" * 100_000)
    assert [c.token_ids.tolist() for c in engine.generate(asked, params)] == [c.token_ids.tolist() for c in new]
    engine.update_weights(folder, 3, old)


def publish(folder: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor] = lambda t: t * 0.5) -> str:
    """Other weights of the same shape in `target`; their digest."""
    shutil.copytree(folder, target)
    tensors = read_tensors(folder)
    return write_tensors(target, {name: change(t) if t.ndim == 2 else t for name, t in tensors.items()})


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def cut_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def drop_a_tensor(folder: Path) -> None:
    tensors = read_tensors(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_tensors(folder, tensors)


def reshape_a_tensor(folder: Path) -> None:
    write_tensors(folder, read_tensors(folder) | {"model.norm.weight": torch.ones(7)})


def other_dtype(folder: Path) -> None:
    write_tensors(folder, {name: tensor.bfloat16() for name, tensor in read_tensors(folder).items()})


ASKED_FOR = r"weights of digest \w{64} where \w{64} is wanted; publish that policy again"


@pytest.mark.parametrize(
    ("damage", "own_digest", "error"),
    [
        (flip_a_bit, False, r"engine, loaded from .*new: " + ASKED_FOR),
        (other_dtype, False, ASKED_FOR),
        (
            cut_a_byte,
            False,
            r"new: cannot be loaded \(.* not a readable safetensors file .*\); publish that policy again",
        ),
        # Even if the file is what was asked for, the model is not.
        (drop_a_tensor, True, r"up_proj.weight.*config.json, no more|" + ASKED_FOR),
        (reshape_a_tensor, True, r"model.norm.weight has shape \(7,\) where|new: cannot be loaded"),
    ],
)
def test_c25_wrong_weights_are_refused_and_the_old_ones_serve_on(
    engine, folder, model, tmp_path, damage, own_digest, error
):
    old = engine.policy_digest
    wanted = publish(folder, tmp_path / "new")
    damage(tmp_path / "new")
    if own_digest:
        wanted = tensors_digest(read_tensors(tmp_path / "new"))
    with pytest.raises(WeightsMismatch, match=error):
        engine.update_weights(tmp_path / "new", 4, wanted)
    assert (engine.policy_digest, engine.health().policy_version) == (old, 3)
    asked = requests(5)
    completions = engine.generate(asked, PLAIN)
    assert {(c.policy_version, c.policy_digest) for c in completions} == {(3, old)}
    assert_logprobs(engine, model, asked, completions, PLAIN)
