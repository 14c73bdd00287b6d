"""Steps of the trainer on several ranks of a real Ray: each commits once, and one layout goes on from the other's."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from data.checkpoints import Checkpoints
from data.columns import REPLAYS, REWARDS
from data.config import (
    AdvantageConfig,
    CheckpointConfig,
    CorrectionConfig,
    CriticConfig,
    LayoutConfig,
    OptimizerConfig,
    ResourcesConfig,
    TrainConfig,
)
from data.manifest import Manifest
from data.tables import read_table
from infra.ray_session import Fleet, Role
from models.megatron.contract import Setup, TrainOptions
from models.weights import read_tensors, tensors_digest
from ops.mismatch import EDGES
from tasks.advantages import _advantages
from tasks.publish import _publish
from tasks.replay import _replay
from tasks.roles import trainer_role
from tasks.state import NotTheState, _drain
from tasks.train import _train

TRAIN = TrainConfig(mini_batch=2, micro_tokens=64)
SETUP = Setup(CriticConfig(kind="shared"), OptimizerConfig(lr=1e-3))
HOW = TrainOptions(TRAIN, 1.0)
ENGINE = -6.3  # log-prob of each sampled token; of an untrained toy some are above, some below


def toy(bench: Any, folder: Any) -> Manifest:
    from models.toy import write_toy

    write_toy(folder)
    attempt = bench.job("import_model", "policy", {}).attempt()
    attempt.add_folder(folder)
    return attempt.commit(content_digest=tensors_digest(read_tensors(folder)), facts={"policy_version": 0})


def rewards(bench: Any, rollouts: Manifest, values: list[float]) -> Manifest:
    ids = read_table(bench.ledger.store, rollouts)["trajectory_id"].to_pylist()
    rows = [
        {"trajectory_id": t, "reward": r, "raw_reward": r, "scorer": "hand", "scorer_digest": "h", "status": "ok"}
        for t, r in zip(ids, values, strict=True)
    ]
    return bench.record("score", "rewards", pa.Table.from_pylist(rows, schema=REWARDS))


def recorded(layout: LayoutConfig) -> dict[str, Any]:
    """What the step `train` has on record of TRAIN and SETUP."""
    settings = {"train": TRAIN.model_copy(update={"optimizer": SETUP.optimizer}), "critic": SETUP.critic}
    config = {name: section.semantic() for name, section in settings.items()}
    ways = {"layout": layout.model_dump(), "threads": 1, "micro_tokens": TRAIN.micro_tokens}
    return {"config": config | {"temperature": 1.0, "policy_frozen": False}, "execution": ways}


def assert_measured(made: Manifest, replayed: pa.Table) -> None:
    """7 + 3 + 5 sampled tokens."""
    apart = np.concatenate([np.array(row[3:]) - ENGINE for row in replayed["old_logprobs"].to_pylist()])
    fact = made.facts["mismatch"]
    assert fact["measured"] and sum(fact["counts"]) == len(apart) == 15
    assert fact["edges"] == list(EDGES) and sum(fact["counts"][: len(EDGES)]) == (apart < 0).sum()
    assert made.metrics["engine_logprob_gap/mean"] == pytest.approx(np.abs(apart).mean())
    assert made.metrics["engine_kl/k3"] == pytest.approx((np.exp(apart) - 1 - apart).mean())
    assert made.metrics["engine_ratio/max"] == pytest.approx(np.exp(apart.max()))


def corrected_by_sequence(bench: Any, fleet: Fleet, role: Role, inputs: dict[str, Manifest], plain: Manifest) -> None:
    """A mask that only the likeliest trajectory of the first optimizer step passes, with its weight.

    Advantages are the same, and so is the first step's old policy: what is left of its loss is that trajectory's part.
    """
    store = bench.ledger.store
    old, plan = (read_table(store, inputs["replays"])[name].to_pylist() for name in ("old_logprobs", "mini_batch"))
    total = {i: sum(x - ENGINE for x in row[3:]) for i, row in enumerate(old) if plan[i] == 0}
    best, worst = sorted(total, key=lambda i: -total[i])
    weight, below = np.exp(total[best]), np.exp(total[worst])
    correction = CorrectionConfig(kind="mask", level="sequence", low=float((weight * below) ** 0.5), high=1e9)
    how = replace(HOW, train=TRAIN.model_copy(update={"correction": correction}))
    made = fleet.run(role, _train, bench.job("corrected", "state", inputs), how, SETUP, None)

    lengths = {i: len(old[i]) - 3 for i in (best, worst)}
    tokens = sum(lengths.values())
    advantages = read_table(store, inputs["advantages"])["token_advantages"].to_pylist()[best][3:]
    first, before = made.facts["updates"][0], plain.facts["updates"][0]
    assert first["loss/policy"] == pytest.approx(-weight * sum(advantages) / tokens, rel=1e-4)
    assert first["loss/policy"] != pytest.approx(before["loss/policy"], rel=1e-2)
    assert first["loss/value"] == pytest.approx(before["loss/value"], rel=1e-4)
    assert first["correction/mean"] == pytest.approx(weight * lengths[best] / tokens, rel=1e-4)
    assert first["correction/masked"] == pytest.approx(lengths[worst] / tokens)
    assert first["correction/raw/max"] == pytest.approx(weight, rel=1e-4)
    assert made.metrics["correction/raw/max"] >= first["correction/raw/max"]
    assert not any(name.startswith("correction/") for name in plain.metrics)


def test_steps_on_two_ranks_commit_once_and_go_on_under_another_layout(bench: Any, fleet: Fleet, tmp_path: Any) -> None:
    policy = toy(bench, tmp_path / "toy")
    # Three rows in mini-batches of two: the last has one row, so that one rank's share of it is empty.
    rollouts = bench.rollouts(["abcdef", "ab", "abcd"], logprob=ENGINE)
    rows = {"rollouts": rollouts, "rewards": rewards(bench, rollouts, [1.0, 0.0, 1.0])}
    layouts = {"data": LayoutConfig(data=2), "tensor": LayoutConfig(tensor=2)}
    data, tensor = (
        replace(trainer_role(ResourcesConfig(threads=1), layout), name=f"{name}-ranks")
        for name, layout in layouts.items()
    )

    replaying = bench.job("replay", "replays", {**rows, "state": policy})
    rows["replays"] = fleet.run(data, _replay, replaying, 1.0, TRAIN, SETUP)
    replayed = read_table(bench.ledger.store, rows["replays"])
    assert replayed.schema == REPLAYS and sorted(replayed["mini_batch"].to_pylist()) == [0, 0, 1]
    assert all(min(row[3:]) < 0.0 for row in replayed["old_logprobs"].to_pylist())  # every action token has one

    assert_measured(rows["replays"], replayed)

    rows["advantages"] = _advantages(None, bench.job("advantages", "advantages", rows), AdvantageConfig())
    training = bench.job("train", "state", {**rows, "state": policy}, **recorded(layouts["data"]))
    trained = fleet.run(data, _train, training, HOW, SETUP, CheckpointConfig())
    fleet.run(data, _drain, bench.cache)
    first = trained.facts["updates"][0]
    assert [first[f"ratio/{x}"] for x in ("min", "max")] == [1.0, 1.0]  # each rank has the rows that it replayed
    again = fleet.run(tensor, _train, bench.job("again", "state", {**rows, "state": policy}), HOW, SETUP, None)
    assert again.facts["updates"][1] == pytest.approx(trained.facts["updates"][1], rel=1e-4, abs=1e-6)
    corrected_by_sequence(bench, fleet, data, {**rows, "state": policy}, again)

    def publish(role: Role, state: Manifest, step: str) -> Manifest:
        execution = recorded(layouts[role.name.removesuffix("-ranks")])["execution"]
        job = bench.job(step, "policy", {"state": state, "base": policy}, execution=execution)
        return fleet.run(role, _publish, job, SETUP, False)

    def forget(role: Role, step: str) -> None:
        """Bring the trainer elsewhere."""
        fleet.run(role, _replay, bench.job(step, "replays", {**rows, "state": policy}), 1.0, TRAIN, SETUP)

    made = [publish(role, trained, role.name) for role in (data, tensor)]
    assert made[0].content_digest == made[1].content_digest != policy.content_digest
    assert (bench.job("", "", {"p": made[0]}).folder("p") / "tokenizer.json").is_file()

    # The state is not kept any longer: the same ranks make it again to the bit, another layout nearly.
    checkpoints = Checkpoints(bench.ledger)
    assert checkpoints.live() == [0] and checkpoints.find(trained) is not None
    shutil.rmtree(tmp_path / "store/hand/checkpoints")
    for role in (data, tensor):
        forget(role, f"forget-{role.name}")
    repeated, near = (publish(role, trained, f"repeated-{role.name}") for role in (data, tensor))
    assert repeated.content_digest == made[0].content_digest != near.content_digest
    assert repeated.execution["state_rebuilt"] == near.execution["state_rebuilt"] == [0]
    one, other = (read_tensors(bench.job("", "", {"p": p}).folder("p")) for p in (repeated, near))
    apart = torch.cat([(one[name] - other[name]).abs().flatten() for name in one])
    assert apart.max() <= 4e-3  # Adam can turn the sign of a tiny gradient into a step of lr either way, twice
    assert apart.mean() < 1e-6
    forget(data, "once-more")
    with pytest.raises(
        NotTheState, match=r"iteration 0 of 'hand', repeated .* gave another state than the recorded beef"
    ):
        publish(data, trained.model_copy(update={"content_digest": "beef"}), "false")

    other = Setup(CriticConfig(kind="none"), SETUP.optimizer)
    headless = bench.job("headless", "policy", {"state": trained, "base": policy}, execution=training.request.execution)
    with pytest.raises(ValueError, match=r"its critic is 'shared', critic\.kind is 'none'"):
        fleet.run(data, _publish, headless, other, False)

    for role in (data, tensor):
        fleet._dismiss(role.name)
