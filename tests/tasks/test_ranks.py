"""Steps of the trainer on several ranks of a real Ray: each commits once, and one layout goes on from the other's."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from data.columns import REPLAYS, REWARDS
from data.config import AdvantageConfig, CriticConfig, LayoutConfig, OptimizerConfig, TrainConfig
from data.manifest import Manifest
from data.tables import read_table
from infra.ray_session import Fleet
from models.megatron.contract import Setup, TrainOptions
from models.weights import read_tensors, tensors_digest
from tasks.advantages import _advantages
from tasks.publish import _publish
from tasks.replay import _replay
from tasks.roles import trainer_role
from tasks.train import _train

TRAIN = TrainConfig(mini_batch=2, micro_tokens=64)
SETUP = Setup(CriticConfig(kind="shared"), OptimizerConfig(lr=1e-3))
HOW = TrainOptions(TRAIN, 1.0)


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


def test_steps_on_two_ranks_commit_once_and_go_on_under_another_layout(bench: Any, fleet: Fleet, tmp_path: Any) -> None:
    policy = toy(bench, tmp_path / "toy")
    # Three rows in mini-batches of two: the last has one row, so that one rank's share of it is empty.
    rollouts = bench.rollouts(["abcdef", "ab", "abcd"])
    rows = {"rollouts": rollouts, "rewards": rewards(bench, rollouts, [1.0, 0.0, 1.0])}
    data, tensor = (trainer_role(1, layout) for layout in (LayoutConfig(data=2), LayoutConfig(tensor=2)))
    data, tensor = replace(data, name="data-ranks"), replace(tensor, name="tensor-ranks")

    rows["replays"] = fleet.run(
        data, _replay, bench.job("replay", "replays", {**rows, "state": policy}), 1.0, TRAIN, SETUP
    )
    replayed = read_table(bench.ledger.store, rows["replays"])
    assert replayed.schema == REPLAYS and sorted(replayed["mini_batch"].to_pylist()) == [0, 0, 1]
    assert all(min(row[3:]) < 0.0 for row in replayed["old_logprobs"].to_pylist())  # every action token has one

    rows["advantages"] = _advantages(None, bench.job("advantages", "advantages", rows), AdvantageConfig())
    trained = fleet.run(data, _train, bench.job("train", "state", {**rows, "state": policy}), HOW, SETUP)
    first = trained.facts["updates"][0]
    assert [first[f"ratio/{x}"] for x in ("min", "max")] == [1.0, 1.0]  # each rank has the rows that it replayed
    again = fleet.run(tensor, _train, bench.job("again", "state", {**rows, "state": policy}), HOW, SETUP)
    assert again.facts["updates"][1] == pytest.approx(trained.facts["updates"][1], rel=1e-4, abs=1e-6)

    made = [
        fleet.run(role, _publish, bench.job(role.name, "policy", {"state": trained, "base": policy}), SETUP)
        for role in (data, tensor)
    ]
    assert made[0].content_digest == made[1].content_digest != policy.content_digest
    assert (bench.job("", "", {"p": made[0]}).folder("p") / "tokenizer.json").is_file()

    for role in (data, tensor):
        fleet._dismiss(role.name)
