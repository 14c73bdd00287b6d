"""Megatron against transformers: the same weights, the same log-probs, back to the same bytes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.megatron.contract import TrainBatch
from models.megatron.mapping import to_hf, to_megatron
from models.megatron.shape import ModelShape, Rope
from models.weights import WeightsMismatch, read_tensors
from ops.ragged import from_rows

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = [(family, tied, {}) for family in ("qwen3", "qwen2", "llama") for tied in (True, False)]
MODELS += [("llama", True, {"rope_parameters": LLAMA3}), ("qwen3", True, {"num_key_value_heads": 4, "head_dim": 8})]
MODELS += [("qwen3_moe", False, {}), ("qwen3_moe", True, {"norm_topk_prob": False})]


@pytest.mark.parametrize(("family", "tied", "more"), MODELS)
def test_logprobs_entropy_and_round_trip(
    trainer, make_model, make_setup, digest_of, reference_logprobs, trajectories, tmp_path, family, tied, more
) -> None:
    folder = make_model(family, tied=tied, **more)
    digest = digest_of(folder)
    batch: TrainBatch = trajectories(3, [(1, 40), (7, 9), (60, 100), (3, 1), (20, 25), (2, 30)])
    trainer.bring_to_policy(folder, digest, make_setup())

    order = [np.array([4, 0]), np.array([2]), np.array([1, 5, 3])]
    replayed = trainer.replay(batch.streams, batch.action_mask, order, 0.8, values=False)
    logprobs, entropy = reference_logprobs(folder, batch.streams, 0.8)
    mask = batch.action_mask.values
    assert np.abs(replayed.logprobs.values - logprobs.values * mask).max() <= 1e-5
    assert np.abs(replayed.entropy.values - entropy.values * mask).max() <= 1e-5
    assert replayed.values is None and replayed.bootstrap_values is None

    assert trainer.export_policy(tmp_path / "out") == digest
    before, after = read_tensors(folder), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_the_grouping_of_rows_hardly_matters_and_absent_rows_are_zero(
    trainer, small_model, digest_of, make_setup, trajectories
) -> None:
    batch: TrainBatch = trajectories(4, [(3, 5), (6, 20), (2, 9), (4, 4)])
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup())
    one = trainer.replay(batch.streams, batch.action_mask, [np.array([0, 1, 2])], 1.0, values=False)
    three = trainer.replay(batch.streams, batch.action_mask, [np.array([r]) for r in (2, 0, 1)], 1.0, values=False)
    assert np.abs(one.logprobs.values - three.logprobs.values).max() <= 1e-5
    assert (one.logprobs.row(0)[3:] < 0).all() and not one.logprobs.row(3).any()


def test_bfloat16_stays_bfloat16(
    trainer, make_model, digest_of, make_setup, reference_logprobs, trajectories, tmp_path
):
    folder = make_model("qwen3", dtype=torch.bfloat16)
    batch: TrainBatch = trajectories(3, [(1, 40), (7, 9)])
    trainer.bring_to_policy(folder, digest_of(folder), make_setup())
    replayed = trainer.replay(batch.streams, batch.action_mask, [np.arange(2)], 1.0, values=False)
    logprobs, _ = reference_logprobs(folder, batch.streams)
    # bfloat16 keeps 8 bits: logits of about 4 are off by about .02.
    assert np.abs(replayed.logprobs.values - logprobs.values * batch.action_mask.values).max() <= 0.2
    assert trainer.export_policy(tmp_path / "out") == digest_of(folder)


def test_qkv_rows_are_interleaved_per_group() -> None:
    # 4 query heads, 2 key-value heads of size 1: group 0 holds q0 q1 k0 v0, group 1 q2 q3 k1 v1.
    shape = ModelShape("qwen3", 1, 1, 1, 4, 2, 1, 1, 8, 1e-6, True, Rope(1e4))
    names = {f"model.layers.0.self_attn.{x}_proj.weight": torch.arange(n)[:, None] + t for x, n, t in
             (("q", 4, 0), ("k", 2, 10), ("v", 2, 20))}  # fmt: skip
    names |= {f"model.layers.0.mlp.{x}_proj.weight": torch.full((1, 1), v) for x, v in (("gate", 5), ("up", 6))}
    other = ["embed_tokens", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    other += ["layers.0.self_attn.o_proj", "layers.0.mlp.down_proj", "layers.0.self_attn.q_norm"]
    names |= {f"model.{name}.weight": torch.ones(1, 1) for name in [*other, "layers.0.self_attn.k_norm"]}
    ours = to_megatron(names, shape)
    assert ours["decoder.layers.0.self_attention.linear_qkv.weight"][:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert ours["decoder.layers.0.mlp.linear_fc1.weight"][:, 0].tolist() == [5, 6]
    back = to_hf(ours, shape)
    assert back.keys() == names.keys() and all(torch.equal(back[name], names[name]) for name in names)


def test_missing_and_surplus_tensors_are_named(small_model: Path) -> None:
    shape, tensors = ModelShape.from_hf(small_model), read_tensors(small_model)
    lacking = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(ValueError, match=r"lacks \['model.layers.1.mlp.up_proj.weight'\]"):
        to_megatron(lacking, shape)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj.bias"):
        to_megatron(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, shape)


def test_another_policy_than_asked_for_is_refused(trainer, small_model, make_setup) -> None:
    with pytest.raises(WeightsMismatch, match="0123"):
        trainer.bring_to_policy(small_model, "0123", make_setup())
    assert trainer.digest is None
    with pytest.raises(RuntimeError, match="holds no model"):
        trainer.export_policy(Path("unused"))


@pytest.mark.parametrize(
    ("rows", "mask", "message"),
    [
        ([[1, 2], [3, 4]], [[False, True], [True, True]], "row 1: its first token is an action"),
        ([[1, 2], []], [[False, True], []], "row 1: an empty stream"),
        ([[1, 2], [3]], [[False], [False, True]], "action_mask"),
    ],
)
def test_streams_that_cannot_be_read_are_refused(trainer, small_model, digest_of, make_setup, rows, mask, message):
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup())
    with pytest.raises(ValueError, match=message):
        trainer.replay(from_rows(rows, np.int32), from_rows(mask, bool), [np.arange(2)], 1.0, values=False)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_greedy_temperature_is_refused(trainer, small_model, digest_of, make_setup, eight, temperature) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup())
    with pytest.raises(ValueError, match="temperature"):
        trainer.replay(eight.streams, eight.action_mask, [np.arange(8)], temperature, values=False)


def test_the_shim_leaves_torch_and_transformers_alone(
    device: torch.device, make_model: Callable[..., Path], reference_logprobs, trajectories
) -> None:
    assert torch.zeros(1).type() == "torch.FloatTensor"
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="cuda")
    logprobs, _ = reference_logprobs(make_model("llama"), trajectories(5, [(2, 6)]).streams)  # loaded after the shim
    assert np.isfinite(logprobs.values).all()
