"""The engine on a sharpened toy model: log-probs against a plain forward pass, seeds, limits and weight updates."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from models.engines.contract import NonFiniteLogits, Request
from models.engines.transformers import TransformersEngine
from models.toy import write_toy
from models.weights import WeightsMismatch, read_tensors, tensors_digest, write_tensors
from tests.models.slow_engine import MANY_EOS, PLAIN, kept, requests, scaled_probs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The toy with matrices six times as large: next-token distributions far from uniform."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    write_tensors(folder, {name: t * 6 if t.ndim == 2 else t for name, t in read_tensors(folder).items()})
    return folder


def start(folder, batch: int = 16) -> TransformersEngine:
    engine = TransformersEngine(batch, threads=2)
    engine.update_weights(folder, 3, tensors_digest(read_tensors(folder)))
    return engine


@pytest.fixture(scope="module")
def engine(folder):
    return start(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def assert_draws(model, asked, completions, params) -> None:
    """Each token is the one that its own uniform number points at, and has its log-prob in what was sampled from."""
    for request, completion in zip(asked, completions, strict=True):
        scaled = scaled_probs(model, request, completion, params)
        uniform = np.random.Generator(np.random.Philox(key=request.seed)).random(len(scaled))
        for probs, token, logprob, number in zip(
            scaled, completion.token_ids, completion.logprobs, uniform, strict=True
        ):
            allowed = np.isin(np.arange(len(probs)), kept(probs, params))
            drawn_from = np.where(allowed, probs, 0.0) / probs[allowed].sum()
            assert logprob == pytest.approx(np.log(drawn_from[token]), abs=1e-5)
            below = drawn_from[:token].sum()
            assert params.greedy or below - 1e-5 <= number <= below + drawn_from[token] + 1e-5


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
def test_each_token_is_the_one_that_its_own_uniform_number_points_at(engine, model, changes):
    params = replace(PLAIN, **changes)
    asked = requests()
    completions = engine.generate(asked, params)
    assert_draws(model, asked, completions, params)


def test_an_eos_on_the_last_allowed_token_is_a_stop(engine):
    asked = requests(1)
    first = engine.generate(asked, replace(PLAIN, max_new_tokens=1, eos_ids=()))[0]
    assert first.finish_reason == "length"
    again = engine.generate(asked, replace(PLAIN, max_new_tokens=1, eos_ids=(5, int(first.token_ids[0]))))[0]
    assert again.finish_reason == "stop"
    assert again.token_ids.tolist() == first.token_ids.tolist()


def test_finished_rows_leave_the_batch(folder):
    engine = start(folder, batch=40)
    fed: list[int] = []
    embedding = engine._serving.model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[0]))
    lengths = [len(c.token_ids) for c in engine.generate(requests(40), replace(PLAIN, eos_ids=MANY_EOS))]
    hook.remove()
    # Before step k the rows with more than k tokens are alive; at most as many again may be ballast.
    alive = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert len(fed) == len(alive)
    assert all(living <= rows < 2 * max(living, 1) + 1 for rows, living in zip(fed, alive, strict=True))
    assert fed[-1] < 40


def test_the_same_call_gives_the_same_bytes(engine, folder):
    params = replace(PLAIN, eos_ids=MANY_EOS)
    for other in (engine, start(folder)):
        for a, b in zip(engine.generate(requests(), params), other.generate(requests(), params), strict=True):
            assert a.token_ids.tobytes() == b.token_ids.tobytes()
            assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_a_trajectory_depends_on_its_own_seed_not_on_its_neighbours(engine, folder):
    asked = requests(200)
    together = engine.generate(asked, PLAIN)
    for batch in (1, 7, 200):
        other = start(folder, batch).generate(asked[::-1], PLAIN)[::-1]
        equal = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(together, other, strict=True)]
        # Not all: the batch shape changes the last bits of the logits, which flips a draw that was a close call.
        assert np.mean(equal) >= 0.99


def test_seeds_decide(engine):
    prompt = np.array([1, 2, 3], np.int32)
    same = engine.generate([Request("a", prompt, 5), Request("b", prompt, 5)], PLAIN)
    assert same[0].token_ids.tolist() == same[1].token_ids.tolist()
    others = engine.generate([Request(str(seed), prompt, seed) for seed in range(20)], PLAIN)
    assert len({tuple(completion.token_ids.tolist()) for completion in others}) == 20


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (LlamaConfig(tie_word_embeddings=False), LlamaForCausalLM),
        (Qwen2Config(tie_word_embeddings=True), Qwen2ForCausalLM),
    ],
    ids=["Llama", "Qwen2"],
)
def test_other_families(tmp_path, config, family):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48}
    config = type(config)(tie_word_embeddings=config.tie_word_embeddings, initializer_range=0.3, **shape, **heads)
    torch.manual_seed(0)
    model = family(config).eval()
    model.save_pretrained(tmp_path)
    asked = requests(12, vocab=64)
    params = replace(PLAIN, eos_ids=(2, 7, 11), max_new_tokens=40)
    completions = start(tmp_path).generate(asked, params)
    assert_draws(model, asked, completions, params)


def test_a_bad_request_is_refused_before_another_is_generated(engine, monkeypatch):
    monkeypatch.setattr("models.engines.transformers.decode", lambda *_: pytest.fail("it generated"))
    fine = Request("fine", np.array([1], np.int32), 0)
    with pytest.raises(ValueError, match="trajectory e: an empty prompt"):
        engine.generate([fine, Request("e", np.zeros(0, np.int32), 0)], PLAIN)
    with pytest.raises(ValueError, match=r"engine.batch is 0; it must be at least 1"):
        TransformersEngine(0, threads=2)


def test_broken_weights_are_named_when_they_show(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "nan")
    norm = torch.full((96,), float("nan"))
    write_tensors(tmp_path / "nan", read_tensors(folder) | {"model.norm.weight": norm})
    engine = start(tmp_path / "nan")
    with pytest.raises(NonFiniteLogits, match=r"p@0/0: logits of new token 0 are not finite under policy version 3"):
        engine.generate(requests(1), PLAIN)


def test_the_engine_does_not_import_megatron():
    code = "import sys, models.engines.transformers; sys.exit('megatron' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_weights_that_come_and_go_are_those_of_a_new_engine(folder, tmp_path):
    """Later weights go into a model that served before; what fails on the way there leaves nothing behind."""
    policies = [folder]
    for number in (1, 2, 3):
        shutil.copytree(folder, tmp_path / str(number))
        write_tensors(tmp_path / str(number), {n: t * (1 + number / 10) for n, t in read_tensors(folder).items()})
        policies.append(tmp_path / str(number))
    digests = [tensors_digest(read_tensors(policy)) for policy in policies]
    asked, engine = requests(6), TransformersEngine(4, 1)
    for version, i in enumerate((0, 1, 2, 3, 1, 0)):
        engine.update_weights(policies[i], version, digests[i])
        if version == 3:
            with pytest.raises(WeightsMismatch):
                engine.update_weights(policies[0], 9, digests[1])
        fresh = TransformersEngine(4, 1)
        fresh.update_weights(policies[i], version, digests[i])
        for mine, theirs in zip(engine.generate(asked, PLAIN), fresh.generate(asked, PLAIN), strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert mine.logprobs.tolist() == theirs.logprobs.tolist() and mine.policy_digest == digests[i]
