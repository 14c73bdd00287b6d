"""The engine on a sharpened toy model: log-probs against a plain forward pass, seeds, limits and weight updates."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from models.engines.contract import (
    GREEDY,
    SAMPLED,
    NonFiniteLogits,
    NotReady,
    PromptTooLong,
    Request,
    SamplingParams,
)
from models.engines.transformers import TransformersEngine
from models.toy import write_toy
from models.weights import WeightsMismatch, read_tensors, tensors_digest, write_tensors

PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9, eos_ids=(2,))
MANY_EOS = tuple(range(0, 512, 9))  # one token in nine ends an answer: rows leave the batch at every step


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


def requests(count: int = 40, vocab: int = 512, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 24 tokens in no order of length."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab, rng.integers(1, 25)).astype(np.int32) for _ in range(count)]
    return [Request(f"p@{i}/0", prompt, seed=100 + i) for i, prompt in enumerate(prompts)]


def slow_distributions(model, request, completion, params) -> np.ndarray:
    """[new, vocab]: what each token was drawn from, by one unpadded pass without a cache over the whole stream."""
    stream = np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64)
    with torch.no_grad():
        logits = model(torch.from_numpy(stream)[None], use_cache=False).logits[0].double()
    first = len(request.token_ids)
    return np.stack([_slow_distribution(logits[at - 1], params) for at in range(first, len(stream))])


def _slow_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    probs = (logits / (params.temperature or 1.0)).softmax(0).numpy()
    if params.greedy:
        return probs
    likeliest = np.argsort(-probs, kind="stable")[: params.top_k or None]
    shares = probs[likeliest] / probs[likeliest].sum()
    while params.top_p < 1.0 and len(shares) > 1 and shares[:-1].sum() >= params.top_p:
        likeliest, shares = likeliest[:-1], shares[:-1]
    return np.where(np.isin(np.arange(len(probs)), likeliest), probs, 0.0) / probs[likeliest].sum()


def assert_logprobs(model, asked, completions, params) -> None:
    """Each log-prob is that of the plain pass, and each token the one its own uniform number points at."""
    for request, completion in zip(asked, completions, strict=True):
        assert completion.trajectory_id == request.trajectory_id
        assert completion.logprobs.dtype == np.float32
        assert completion.token_ids.dtype == np.int32
        assert (completion.logprobs <= 0).all()
        probs = slow_distributions(model, request, completion, params)
        steps = np.arange(len(probs))
        drawn = probs[steps, completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, np.log(drawn), rtol=0, atol=1e-5)
        if not params.greedy:
            uniform = np.random.Generator(np.random.Philox(key=request.seed)).random(len(probs))
            below = probs.cumsum(-1)[steps, completion.token_ids] - drawn
            assert ((below - 1e-5 <= uniform) & (uniform <= below + drawn + 1e-5)).all()


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
    completions = engine.generate(asked, params)
    assert_logprobs(model, asked, completions, params)


def test_greedy_takes_the_argmax_of_every_step(engine, model):
    asked = requests(8)
    for request, completion in zip(asked, engine.generate(asked, replace(PLAIN, temperature=0.0)), strict=True):
        stream = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            best = model(stream[None], use_cache=False).logits[0].argmax(-1).numpy()
        assert completion.token_ids.tolist() == best[len(request.token_ids) - 1 : -1].tolist()


def test_semantics_are_named(engine):
    assert engine.logprob_semantics(replace(PLAIN, top_p=0.8)) == SAMPLED == "sampled"
    assert engine.logprob_semantics(replace(PLAIN, temperature=0.0)) == GREEDY
    assert GREEDY.startswith("greedy: softmax at temperature 1, before top_p and top_k")


def test_answers_end_at_the_first_eos_or_at_the_limit(engine):
    params = replace(PLAIN, eos_ids=MANY_EOS, max_new_tokens=12)
    completions = engine.generate(requests(), params)
    for completion in completions:
        ends = np.isin(completion.token_ids, MANY_EOS)
        if completion.finish_reason == "stop":
            assert ends[-1]
            assert not ends[:-1].any()
        else:
            assert not ends.any()
            assert len(completion.token_ids) == 12
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    assert {len(completion.logprobs) for completion in completions} > {1, 2, 3}


def test_an_eos_on_the_last_allowed_token_is_a_stop(engine):
    asked = requests(1)
    first = engine.generate(asked, replace(PLAIN, max_new_tokens=1, eos_ids=()))[0]
    assert first.finish_reason == "length"
    again = engine.generate(asked, replace(PLAIN, max_new_tokens=1, eos_ids=(5, int(first.token_ids[0]))))[0]
    assert again.finish_reason == "stop"
    assert again.token_ids.tolist() == first.token_ids.tolist()


def test_the_context_limits_the_answer(engine, model):
    params = replace(PLAIN, eos_ids=())
    asked = [Request(f"{n}", np.arange(n, dtype=np.int32) % 512, seed=n) for n in (511, 508, 2)]
    completions = engine.generate(asked, params)
    # 512 positions: 511 leave one, 508 leave four, 2 leave more than the nine allowed.
    assert [len(completion.token_ids) for completion in completions] == [1, 4, 9]
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert_logprobs(model, asked, completions, params)


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


def test_first_tokens_follow_the_models_distribution(engine, model):
    prompt = np.array([1, 345, 22, 26, 2], np.int32)
    params = replace(PLAIN, temperature=0.6, top_k=12, max_new_tokens=1)
    count = 4000
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
    assert_logprobs(model, asked, completions, params)


def test_completions_and_health_carry_the_policy(engine, folder):
    digest = tensors_digest(read_tensors(folder))
    completion = engine.generate(requests(1), PLAIN)[0]
    assert (completion.policy_version, completion.policy_digest) == (3, digest)
    health = engine.health()
    assert (health.ready, health.policy_version, health.policy_digest, health.context) == (True, 3, digest, 512)
    empty = TransformersEngine(1, threads=2)
    assert (empty.health().ready, empty.policy_digest) == (False, None)


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


def publish(folder: Path, target: Path) -> str:
    """Other weights of the same shape in `target`; their digest."""
    shutil.copytree(folder, target)
    return write_tensors(target, {name: t * 0.5 if t.ndim == 2 else t for name, t in read_tensors(folder).items()})


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (
            flip_a_bit,
            r"engine, loaded from .*new: weights of digest \w{64} where \w{64} is wanted; publish that policy",
        ),
        (cut_a_byte, r"new: cannot be loaded \(.* not a readable safetensors file .*\); publish that policy again"),
        (drop_a_tensor, r"weights of digest \w{64} where \w{64} is wanted"),
        (reshape_a_tensor, r"new: cannot be loaded"),
    ],
)
def test_c25_wrong_weights_are_refused_and_the_old_ones_serve_on(folder, tmp_path, damage, error):
    engine = start(folder)
    old = engine.policy_digest
    before = engine.generate(requests(5), PLAIN)
    wanted = publish(folder, tmp_path / "new")
    damage(tmp_path / "new")
    if damage in (drop_a_tensor, reshape_a_tensor):  # even if the file is what was asked for, the model is not
        wanted = tensors_digest(read_tensors(tmp_path / "new"))
    with pytest.raises(WeightsMismatch, match=error):
        engine.update_weights(tmp_path / "new", 4, wanted)
    assert (engine.policy_digest, engine.health().policy_version) == (old, 3)
    for a, b in zip(before, engine.generate(requests(5), PLAIN), strict=True):
        assert (a.token_ids.tobytes(), a.logprobs.tobytes()) == (b.token_ids.tobytes(), b.logprobs.tobytes())
        assert (b.policy_version, b.policy_digest) == (3, old)


def test_new_weights_serve_and_later_changes_of_the_file_do_not_reach_them(folder, tmp_path):
    engine = start(folder)
    old = engine.generate(requests(5), PLAIN)
    digest = publish(folder, tmp_path / "new")
    engine.update_weights(tmp_path / "new", 4, digest)
    new = engine.generate(requests(5), PLAIN)
    assert {(c.policy_version, c.policy_digest) for c in new} == {(4, digest)}
    assert [c.logprobs.tolist() for c in new] != [c.logprobs.tolist() for c in old]
    path = tmp_path / "new/model.safetensors"
    with path.open("r+b") as file:  # in place: the file may be mapped by the engine
        file.seek(path.stat().st_size // 2)
        file.write(b"\0" * 100_000)
    assert [c.logprobs.tolist() for c in engine.generate(requests(5), PLAIN)] == [c.logprobs.tolist() for c in new]


def test_weights_served_already_only_change_their_version(folder, tmp_path):
    engine = start(folder)
    engine.update_weights(tmp_path / "nowhere", 9, engine.policy_digest)
    assert engine.health().policy_version == 9


def test_bad_requests_are_refused_before_anything_is_generated(engine, monkeypatch):
    monkeypatch.setattr("models.engines.transformers.decode", lambda *_: pytest.fail("it generated"))
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
    with pytest.raises(NotReady, match="no weights yet; call update_weights first"):
        TransformersEngine(1, threads=2).generate([fine], PLAIN)
    with pytest.raises(ValueError, match=r"engine.batch is 0; it must be at least 1"):
        TransformersEngine(0, threads=2)


def test_no_requests_give_no_completions(engine):
    assert engine.generate([], PLAIN) == []


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
