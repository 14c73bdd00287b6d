"""The critic: where values are read, what learns and what stands still, and what is never exported."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import TrainConfig
from models.megatron.contract import TrainBatch, TrainOptions
from models.weights import read_tensors
from ops.ragged import from_rows

EVERYTHING = [np.arange(8)]
FROZEN = TrainOptions(TrainConfig(max_kl=None), 1.0, policy_frozen=True)
FREE = TrainOptions(TrainConfig(max_kl=None), 1.0)


def weights(trainer, part: str) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer._networks.parts[part].bare.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class PositionHead(torch.nn.Module):
    """A critic that answers with the index, within its row, of the token whose hidden state it is shown."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.answer = torch.cat([torch.arange(n) for n in lengths]).float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert len(hidden) == len(self.answer)
        return self.answer.to(hidden.device)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_c5_the_value_of_a_token_is_read_at_the_token_before(
    trainer, small_model, digest_of, make_setup, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup(kind))
    streams = from_rows([[9, 8, 7, 6, 5], [1, 2, 3, 4, 5, 6, 7]], np.int32)
    # Row 0: a prompt of 3. Row 1: prompt 2, two actions, an observation of 2 tokens, one action.
    mask = from_rows([[0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1]], bool)
    monkeypatch.setattr(trainer._networks.parts["value_head"], "module", PositionHead([7, 5]))
    replayed = trainer.replay(streams, mask, [np.array([1, 0])], 1.0, values=True)
    # The first response token's value is prompt length - 1; after the observation it is read at its last token.
    assert replayed.values.row(0).tolist() == [0, 0, 0, 2, 3]
    assert replayed.values.row(1).tolist() == [0, 0, 1, 2, 0, 0, 5]
    # After the end: the last token's own state.
    assert replayed.bootstrap_values.tolist() == [4, 6]


def test_values_without_a_critic_fail_before_the_forward_pass(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch
) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("none"))
    passes = []
    trainer._networks.parts["policy"].module.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=r"critic\.kind 'none'"):
        trainer.replay(eight.streams, eight.action_mask, EVERYTHING, 1.0, values=True)
    assert len(passes) == 0
    trainer.replay(eight.streams, eight.action_mask, EVERYTHING, 1.0, values=False)
    assert len(passes) == 1


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_the_head_is_zero_float32_and_never_exported(
    trainer, make_model, digest_of, make_setup, eight: TrainBatch, tmp_path: Path, kind: str
) -> None:
    folder = make_model("qwen3", dtype=torch.bfloat16)
    trainer.bring_to_policy(folder, digest_of(folder), make_setup(kind))
    head = weights(trainer, "value_head")
    assert {name: (p.dtype, list(p.shape), bool(p.any())) for name, p in head.items()} == {
        "weight": (torch.float32, [1, 48], False),
        "bias": (torch.float32, [1], False),
    }
    trainer.train(eight, [EVERYTHING], FREE)
    assert not same(head, weights(trainer, "value_head"))
    trainer.export_policy(tmp_path / "p")
    assert read_tensors(tmp_path / "p").keys() == read_tensors(folder).keys()


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("none", {"policy": 1e-2}),
        ("shared", {"policy": 1e-2, "value_head": 2e-2}),
        ("separate", {"policy": 1e-2, "critic": 3e-3, "value_head": 2e-2}),
    ],
)
def test_c36_every_part_is_in_the_optimizer_and_follows_the_schedule(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, kind: str, rates: dict[str, float]
) -> None:
    setup = make_setup(kind, schedule="linear", warmup_steps=1, decay_steps=5)
    trainer.bring_to_policy(small_model, digest_of(small_model), setup)
    parts = trainer._networks.parts
    assert parts.keys() == rates.keys()
    for part in parts.values():
        optimized = sum(p.numel() for group in part.optimizer.param_groups for p in group["params"])
        assert optimized == sum(p.numel() for p in part.bare.parameters())
    # Steps 0 … 3 of linear decay from step 1 to step 5: 1, 1, 3/4, 1/2.
    for factor in (1.0, 1.0, 0.75, 0.5):
        (metrics,) = trainer.train(eight, [EVERYTHING], FREE)
        for name, part in parts.items():
            for group in part.optimizer.param_groups:
                assert group["lr"] == pytest.approx(rates[name] * factor)
        assert metrics["lr"] == pytest.approx(1e-2 * factor)
        assert metrics.get("critic_lr") == {"none": None, "shared": pytest.approx(2e-2 * factor)}.get(
            kind, pytest.approx(3e-3 * factor)
        )
    assert ("critic_grad_norm" in metrics) == (kind == "separate")


def test_one_dimensional_parameters_do_not_decay(trainer, small_model, digest_of, make_setup, eight) -> None:
    """Nothing to learn (no loss token), but a weight decay of .5 · lr .01: matrices shrink by .995, norms stay."""
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("none", weight_decay=0.5))
    before = weights(trainer, "policy")
    nothing = replace(eight, loss_mask=eight.streams.like(np.zeros(len(eight.streams.values), bool)))
    (metrics,) = trainer.train(nothing, [EVERYTHING], FREE)
    for name, after in weights(trainer, "policy").items():
        assert torch.allclose(after, before[name] * (0.995 if after.ndim > 1 else 1.0), rtol=1e-6, atol=0), name
    assert (metrics["train/tokens"], metrics["loss/policy"], metrics["ratio/min"], metrics["grad_norm"]) == (0, 0, 1, 0)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_frozen_policy_does_not_move_at_all(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, kind: str
) -> None:
    digest, setup = digest_of(small_model), make_setup(kind)
    trainer.bring_to_policy(small_model, digest, setup)
    before = {part: weights(trainer, part) for part in trainer._networks.parts}
    steps = trainer.train(eight, [EVERYTHING, EVERYTHING], FROZEN)
    for part, old in before.items():
        assert same(old, weights(trainer, part)) == (part == "policy"), part
    assert steps[0]["lr"] == 0 and steps[0]["critic_lr"] > 0 and steps[0]["critic_grad_norm"] > 0
    assert steps[1]["loss/value"] < steps[0]["loss/value"]
    # Its optimizer has not moved either: what follows is what a policy does that was never frozen.
    trainer.train(eight, [EVERYTHING], FREE)
    assert trainer._networks.parts["policy"].steps == 1
    assert trainer._networks.parts["value_head"].steps == 3
    if kind == "separate":
        after = weights(trainer, "policy")
        trainer.bring_to_policy(small_model, digest, setup)
        trainer.train(eight, [EVERYTHING], FREE)
        assert same(after, weights(trainer, "policy"))


def test_freezing_without_a_critic_is_refused(trainer, small_model, digest_of, make_setup, eight) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("none"))
    with pytest.raises(ValueError, match="nothing could learn"):
        trainer.train(eight, [EVERYTHING], FROZEN)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_value_gradients_reach_the_trunk_they_belong_to(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch, kind: str
) -> None:
    """Without advantages only the value loss moves trunks: the policy's if shared, the critic's own if separate."""
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup(kind, weight_decay=0.0))
    still = replace(eight, advantages=eight.streams.like(np.zeros(len(eight.streams.values), np.float32)))
    before = {part: weights(trainer, part) for part in trainer._networks.parts}
    trainer.train(still, [EVERYTHING, EVERYTHING], FREE)  # the first step only gives the zero head a direction
    moved = {part for part, old in before.items() if not same(old, weights(trainer, part))}
    assert moved == {"shared": {"policy", "value_head"}, "separate": {"critic", "value_head"}}[kind]


def test_the_separate_critic_starts_as_a_copy_and_learns_its_returns(
    trainer, small_model, digest_of, make_setup, eight: TrainBatch
) -> None:
    trainer.bring_to_policy(small_model, digest_of(small_model), make_setup("separate"))
    policy, critic = weights(trainer, "policy"), weights(trainer, "critic")
    assert same({name: policy[name] for name in critic}, critic)
    unclipped = make_setup("separate", critic={"clip": None})
    trainer.bring_to_policy(small_model, digest_of(small_model), unclipped)
    steps = trainer.train(eight, [EVERYTHING] * 40, FROZEN)
    assert steps[-1]["loss/value"] < 0.2 * steps[0]["loss/value"]
    replayed = trainer.replay(eight.streams, eight.action_mask, EVERYTHING, 1.0, values=True)
    mask = eight.loss_mask.values
    error = replayed.values.values[mask] - eight.returns.values[mask]
    assert 0.5 * float(np.square(error).mean()) == pytest.approx(steps[-1]["loss/value"], rel=0.5)


def test_an_untied_critic_has_no_output_layer(trainer, make_model, digest_of, make_setup) -> None:
    folder = make_model("llama", tied=False)
    trainer.bring_to_policy(folder, digest_of(folder), make_setup("separate"))
    assert "output_layer.weight" in weights(trainer, "policy")
    assert "output_layer.weight" not in weights(trainer, "critic")
