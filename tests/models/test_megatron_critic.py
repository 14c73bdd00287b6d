"""The critic: where values are read, what learns and what stands still, and what is never exported."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.config import TrainConfig
from models.megatron import course
from models.megatron.contract import TrainBatch, TrainOptions
from models.megatron.micro import prepare_lesson
from models.megatron.networks import Outputs
from models.megatron.objective import Objective, grade
from models.weights import read_tensors
from ops.ragged import from_rows
from ops.turns import value_mask

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


@pytest.fixture
def value_gradients(trainer, small_model, digest_of, make_setup, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """value_gradients(kind, batch, plan, mode): a step's metrics and its gradients, of the value loss alone."""
    found: dict[str, torch.Tensor] = {}
    clip = course.clip

    def keep(parts: list[Any], limit: float) -> float:
        for part in parts:
            found.update({f"{id(part)} {n}": p.main_grad.clone() for n, p in part.bare.named_parameters()})
        return clip(parts, limit)

    def call(kind: str, batch: TrainBatch, plan: list[np.ndarray], mode: str) -> tuple[dict[str, float], Any]:
        trainer.bring_to_policy(small_model, digest_of(small_model), make_setup(kind))
        with torch.no_grad():
            for parameter in trainer._networks.parts["value_head"].bare.parameters():
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
        still = replace(batch, advantages=batch.streams.like(np.zeros(len(batch.streams.values), np.float32)))
        found.clear()
        (metrics,) = trainer.train(still, [plan], TrainOptions(TrainConfig(max_kl=None, aggregation=mode), 1.0))
        return metrics, dict(found)

    monkeypatch.setattr(course, "clip", keep)
    return call


def with_turns(batch: TrainBatch, unit: str) -> TrainBatch:
    """Every fourth token of each row is an observation, so that most rows have several turns."""
    said = batch.action_mask.values & np.concatenate([np.arange(n) % 4 != 1 for n in batch.streams.lengths])
    mask, loss = batch.action_mask.like(said), batch.loss_mask.like(batch.loss_mask.values & said)
    return replace(batch, action_mask=mask, loss_mask=loss, value_mask=value_mask(mask, unit))


def assert_near(one: tuple[dict[str, float], Any], other: tuple[dict[str, float], Any]) -> None:
    for name in ("loss/value", "value/clip_fraction"):
        assert one[0][name] == pytest.approx(other[0][name], rel=1e-5)
    for mine, theirs in zip(one[1].values(), other[1].values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["shared", "separate"])
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_c02_only_a_turn_s_first_token_enters_the_value_loss(
    value_gradients: Callable[..., Any], eight: TrainBatch, kind: str, mode: str
) -> None:
    """Returns and old values of the other tokens may be anything. The loss is that of the first tokens alone.

    So it is a mean over turns, however the step is split.
    """
    batch = with_turns(eight, "turn")
    first = batch.value_mask.values & batch.loss_mask.values
    assert 0 < first.sum() < batch.loss_mask.values.sum() / 2
    found = value_gradients(kind, batch, EVERYTHING, mode)
    assert sum(bool(gradient.any()) for gradient in found[1].values()) > 10  # the trunk's too

    columns = {
        name: getattr(batch, name).like(np.where(first, getattr(batch, name).values, np.float32(1e6)))
        for name in ("returns", "old_values")
    }
    assert same(found[1], value_gradients(kind, replace(batch, **columns), EVERYTHING, mode)[1])
    assert_near(found, value_gradients(kind, batch, [np.arange(5), np.arange(5, 8)], mode))
    alone = replace(batch, loss_mask=batch.loss_mask.like(first), value_mask=None)
    assert_near(found, value_gradients(kind, alone, EVERYTHING, mode))


def test_c02_no_other_value_has_a_gradient(trainer, eight: TrainBatch, device: torch.device) -> None:
    """Of all values that the critic gave, those read at the token before a turn's first one."""
    lesson = prepare_lesson(with_turns(eight, "turn"), EVERYTHING[0], device)
    values = torch.linspace(-1, 1, int(eight.streams.lengths.sum()), device=device, requires_grad=True)
    objective = Objective(None, "token_mean", 1, value_weight=1.0, value_clip=None)
    loss, _, _ = grade(Outputs(None, None, values), lesson, objective)
    loss.backward()
    read_at = lesson.micro.reads.at[lesson.among_actions][lesson.valued]
    assert torch.equal(values.grad.nonzero()[:, 0], read_at.sort().values)


def test_with_tokens_as_steps_nothing_changes(value_gradients: Callable[..., Any], eight: TrainBatch) -> None:
    marked = with_turns(eight, "token")
    metrics, found = value_gradients("shared", marked, EVERYTHING, "token_mean")
    unmarked, plain = value_gradients("shared", replace(marked, value_mask=None), EVERYTHING, "token_mean")
    assert metrics == unmarked and same(found, plain)
