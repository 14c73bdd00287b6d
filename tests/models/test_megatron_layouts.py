"""Every parallel layout against one rank: the same weights, log-probs, gradients, states and continuations."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.config import LayoutConfig, TrainConfig
from models.megatron.contract import BeyondLimit, NonFiniteLoss, Replayed, Setup, TrainBatch, TrainOptions
from ops.ragged import Ragged
from ops.turns import value_mask
from tests.models import gang
from tests.models.gang import save_state

# Rows 0-7 of `eight`; two micro-batches, of which the second has a single row: with DP 2 a rank's share of it is empty.
PLAN = [[np.array([0, 1, 2, 3, 5, 7, 4]), np.array([6])]]
MORE = [[np.array([5, 6, 7])], [np.array([2]), np.array([4, 1])]]
HOW = TrainOptions(TrainConfig(entropy_bonus=0.01, max_kl=None), 0.9)
FROZEN = TrainOptions(TrainConfig(max_kl=None), 0.9, policy_frozen=True)

LAYOUTS = {
    "dp2": LayoutConfig(data=2),
    "tp2": LayoutConfig(tensor=2),
    "tp2-sp": LayoutConfig(tensor=2, sequence_parallel=True),
    "pp2": LayoutConfig(pipeline=2),
    "cp2": LayoutConfig(context=2),
    "dp2-tp2-sp": LayoutConfig(data=2, tensor=2, sequence_parallel=True),
    "dp2-pp2": LayoutConfig(data=2, pipeline=2),
    "tp2-pp2": LayoutConfig(tensor=2, pipeline=2),
    "tp2-cp2-sp": LayoutConfig(tensor=2, context=2, sequence_parallel=True),
    "dp4": LayoutConfig(data=4),
    "dp2-cp2": LayoutConfig(data=2, context=2),
}
# critic -> its kind, the model's family, whether it is tied
MODELS = {
    "shared": ("shared", "qwen3", True),
    "separate": ("separate", "qwen2", False),
    "none": ("none", "llama", True),
    "experts": ("shared", "qwen3_moe", False),
}
SLOW = ("dp2-pp2", "tp2-pp2", "tp2-cp2-sp", "dp4", "dp2-cp2")  # four ranks on two cores; one such layout is in CI
CELLS = [
    *(pytest.param(name, "shared", marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS),
    *((name, "separate") for name in ("dp2", "tp2-sp", "pp2", "cp2")),
    *((name, "none") for name in ("tp2", "pp2")),
    *((name, "experts") for name in ("dp2", "tp2-sp", "pp2", "cp2")),
]


@dataclass(frozen=True)
class Work:
    folder: Path  # the policy
    digest: str
    setup: Setup
    batch: TrainBatch
    out: Path


@dataclass(frozen=True)
class Seen:
    exported: str
    fresh: str  # digest of the untrained state
    replayed: Replayed | None
    gradients: dict[str, np.ndarray] | None
    metrics: dict[str, float]
    saved: str  # digest of the state after one step, which is in out / "state"
    more: list[dict[str, float]]
    frozen: list[dict[str, float]]  # a step more, of the critic alone, with turns as the steps that have a value
    sick: tuple[object, ...]  # args of a loss that is not finite; step and rows, worst first, of a ratio beyond a limit


def work_through(trainer: Any, work: Work) -> Seen:
    """Everything a trainer does, on any layout."""
    batch = work.batch
    trainer.bring_to_policy(work.folder, work.digest, work.setup)
    assert trainer.digest == work.digest
    exported = trainer.export_policy(work.out / "untouched")
    values = work.setup.critic.kind != "none"
    grouping = [rows for step in PLAN for rows in step]
    fresh = save_state(trainer, work.out / "fresh")
    replayed = trainer.replay(batch.streams, batch.action_mask, grouping, 0.9, values)
    (metrics,) = trainer.train(batch, PLAN, HOW)
    gradients = first_gradients(trainer, work.setup)
    saved = save_state(trainer, work.out / "state")
    more = trainer.train(batch, MORE, HOW)
    policy = trainer.export_policy(work.out / "policy")
    by_turns = replace(batch, value_mask=value_mask(batch.action_mask, "turn"))
    frozen = trainer.train(by_turns, PLAN, FROZEN) if values else []
    sick = fall_sick(trainer, batch)
    assert trainer.export_policy(work.out / "policy") == policy
    return Seen(exported, fresh, replayed, gradients, metrics, saved, more, frozen, sick)


def fall_sick(trainer: Any, batch: TrainBatch) -> tuple[object, ...]:
    advantages = batch.advantages.values.copy()
    advantages[batch.advantages.offsets[7] - 1] = np.inf  # row 6
    with pytest.raises(NonFiniteLoss) as caught:
        trainer.train(replace(batch, advantages=batch.advantages.like(advantages)), PLAN, HOW)
    with pytest.raises(BeyondLimit) as beyond:
        trainer.train(batch, PLAN, replace(HOW, train=HOW.train.model_copy(update={"max_ratio": 1.0001})))
    return *caught.value.args, *beyond.value.args[:2]


def first_gradients(trainer: Any, setup: Setup) -> dict[str, np.ndarray] | None:
    """Whole gradients of a first step, from Adam's first moment (1 - beta) g; clipping must not have bitten."""
    from models.megatron import sharding, state

    found = {}
    for name, part in trainer._networks.parts.items():
        whole = sharding.collect(state._states(part)["exp_avg"])
        if whole is not None:
            scale = 1 - setup.optimizer.betas[0]
            found |= {f"{name}.{key}": tensor.double().numpy() / scale for key, tensor in whole.items()}
    return found if trainer.is_first else None


def continue_from(trainer: Any, work: Work, state: Path, digest: str) -> list[dict[str, float]]:
    trainer.bring_to_state(state, digest, work.setup)
    assert trainer.digest == digest
    return trainer.train(work.batch, MORE, HOW)


def work_and_continue(trainer: Any, work: Work, state: Path, digest: str) -> tuple[Seen, list[dict[str, float]]]:
    return work_through(trainer, work), continue_from(trainer, work, state, digest)


def close(got: dict[str, float], wanted: dict[str, float], rel: float = 1e-4) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=rel, abs=1e-6), name


def distance(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Relative, over all parameters."""
    assert got.keys() == wanted.keys()
    a, b = (np.concatenate([side[name].ravel() for name in sorted(wanted)]) for side in (got, wanted))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def weights(batch: TrainBatch) -> Ragged:
    """From .5 to 1.5 and, of every fifth token, 0; but not of row 6, which is to fall sick."""
    found = np.linspace(0.5, 1.5, len(batch.streams.values), dtype=np.float32)
    found[::5] = 0.0
    found[batch.streams.offsets[6] : batch.streams.offsets[7]] = 1.0
    return batch.streams.like(found)


@pytest.fixture(scope="module")
def one_rank(device, world, make_model, digest_of, make_setup, eight: TrainBatch, tmp_path_factory):
    """one_rank(name in MODELS) -> (the work, what one rank made of it); each is computed once."""
    from models.megatron.trainer import Trainer

    made = {}

    def reference(kind: str) -> tuple[Work, Seen]:
        if kind not in made:
            critic, family, tied = MODELS[kind]
            folder = make_model(family, tied=tied)
            # eps large: Adam otherwise turns rounding errors of tiny gradients into full steps.
            setup = make_setup(critic, eps=1e-3, max_grad_norm=1e9)
            batch = replace(eight, weights=weights(eight))
            work = Work(folder, digest_of(folder), setup, batch, tmp_path_factory.mktemp("one"))
            made[kind] = work, work_through(Trainer(*world), work)
        return made[kind]

    return reference


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_a_layout_equals_one_rank(one_rank, world, tmp_path: Path, name: str, kind: str) -> None:
    from models.megatron.trainer import Trainer

    work, one = one_rank(kind)
    answers = gang.run(LAYOUTS[name], work_and_continue, replace(work, out=tmp_path), work.out / "state", one.saved)
    (seen, resumed), others = answers[0], answers[1:]

    assert seen.exported == one.exported == work.digest
    assert seen.fresh == one.fresh
    for other, more in others:
        assert other.replayed is None and other.gradients is None
        assert (other.saved, other.metrics, other.more, more) == (seen.saved, seen.metrics, seen.more, resumed)
        assert (other.frozen, other.sick) == (seen.frozen, seen.sick)

    fields = ["logprobs", "entropy"] + (["values"] if kind != "none" else [])
    gaps = {f: np.abs(getattr(seen.replayed, f).values - getattr(one.replayed, f).values).max() for f in fields}
    assert max(gaps.values()) <= 1e-5
    gap = distance(seen.gradients, one.gradients)
    norm = abs(seen.metrics["grad_norm"] / one.metrics["grad_norm"] - 1)
    print(f"{name} {kind}: logprob {gaps['logprobs']:.1e} gradient {gap:.1e} norm {norm:.1e}")
    assert gap <= (1e-6 if LAYOUTS[name].ranks == LAYOUTS[name].data else 1e-5)
    close(seen.metrics, one.metrics)
    for got, wanted in zip(seen.frozen, one.frozen, strict=True):
        close(got, wanted)
    assert seen.sick == one.sick and seen.sick[:3] == (0, [6], "the loss is not finite")
    # The same from here on, whether it goes on itself, from one rank's state, or one rank from its.
    for step, wanted, again in zip(seen.more, one.more, resumed, strict=True):
        close(step, wanted)
        close(again, wanted)
    for step, wanted in zip(
        continue_from(Trainer(*world), work, tmp_path / "state", seen.saved), one.more, strict=True
    ):
        close(step, wanted)


def step_and_continue(trainer: Any, work: Work, state: Path, digest: str) -> tuple[str, str, str, list[float]]:
    trainer.bring_to_policy(work.folder, work.digest, work.setup)
    exported, fresh = trainer.export_policy(work.out / "untouched"), save_state(trainer, work.out / "fresh")
    trainer.train(work.batch, PLAN, HOW)
    saved = save_state(trainer, work.out / "state")
    return exported, fresh, saved, [step["grad_norm"] for step in continue_from(trainer, work, state, digest)]


def test_bfloat16_with_float32_masters(
    device, world, make_model, digest_of, make_setup, eight: TrainBatch, tmp_path: Path
) -> None:
    """States of 16-bit weights move between layouts to the last bit, as their digests say."""
    from models.megatron.trainer import Trainer

    folder = make_model("qwen3", dtype=torch.bfloat16)
    work = Work(folder, digest_of(folder), make_setup("shared", eps=1e-3), eight, tmp_path / "one")
    one = Trainer(*world)
    one.bring_to_policy(folder, work.digest, work.setup)
    fresh = save_state(one, work.out / "fresh")
    one.train(eight, PLAN, HOW)
    saved = save_state(one, work.out / "state")
    norms = [step["grad_norm"] for step in one.train(eight, MORE, HOW)]
    for name in ("dp2", "tp2-sp", "pp2"):
        there = replace(work, out=tmp_path / name)
        got = gang.run(LAYOUTS[name], step_and_continue, there, work.out / "state", saved)[0]
        assert got[:2] == (work.digest, fresh)
        assert got[3] == pytest.approx(norms, rel=0.05)
        continue_from(one, there, there.out / "state", got[2])
