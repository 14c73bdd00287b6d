"""advantages: from stored tables to the columns of schema.md's worked example."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.columns import REPLAYS, REWARDS
from data.config import AdvantageConfig
from data.tables import read_table
from tasks.advantages import _advantages


def record(bench: Any, rewards: list[float], values: list[list[float]]) -> dict[str, Any]:
    """Answers 'ab' (3 sampled tokens with the end), two siblings a prompt, given rewards and values of those tokens."""
    rollouts = bench.rollouts(["ab"] * len(rewards), samples=2)
    ids = read_table(bench.ledger.store, rollouts)["trajectory_id"].to_pylist()
    scored = [
        {"trajectory_id": t, "reward": r, "raw_reward": r, "scorer": "hand", "scorer_digest": "h",
         "status": "ok" if np.isfinite(r) else "failed", "error": None if np.isfinite(r) else "KeyError"}
        for t, r in zip(ids, rewards, strict=True)
    ]  # fmt: skip
    replayed = [
        {"trajectory_id": t, "values": [0.0, 0.0, 0.0, *v], "bootstrap_value": 9.0, "policy_digest": "p",
         "mini_batch": 0, "micro_batch": 0}
        for t, v in zip(ids, values, strict=True)
    ]  # fmt: skip
    return {
        "rollouts": rollouts,
        "rewards": bench.record("score", "rewards", pa.Table.from_pylist(scored, schema=REWARDS)),
        "replays": bench.record("replay", "replays", pa.Table.from_pylist(replayed, schema=REPLAYS)),
    }


def test_gae_of_the_worked_example(bench: Any) -> None:
    """schema.md, A/0: reward 1, V .2 .5 .8, A .7655 .49 .2, R .9655 .99 1; a failed sibling: zeros."""
    inputs = record(bench, [1.0, float("nan")], [[0.2, 0.5, 0.8], [0.1, 0.1, 0.1]])
    manifest = _advantages(None, bench.job("advantages", "advantages", inputs), AdvantageConfig())
    rows = read_table(bench.ledger.store, manifest).to_pylist()
    assert rows[0]["token_advantages"] == pytest.approx([0, 0, 0, 0.7655, 0.49, 0.2], abs=1e-6)
    assert rows[0]["returns"] == pytest.approx([0, 0, 0, 0.9655, 0.99, 1.0], abs=1e-6)
    assert rows[0]["token_rewards"] == [0, 0, 0, 0, 0, 1]
    assert rows[0]["advantage"] == pytest.approx((0.7655 + 0.49 + 0.2) / 3, abs=1e-6)
    assert rows[1]["token_advantages"] == [0.0] * 6 and rows[1]["loss_mask"] == [False] * 6
    assert rows[1]["excluded"] and rows[1]["reason"] == "failed"
    assert manifest.metrics["advantages/excluded"] == 1


def test_groups_are_siblings(bench: Any) -> None:
    """Rewards 1, 0 | 1, 1: the first pair gives +-1 (less eps), the second exactly 0."""
    inputs = record(bench, [1.0, 0.0, 1.0, 1.0], [[0.0] * 3] * 4)
    config = AdvantageConfig(estimator="group")
    manifest = _advantages(None, bench.job("advantages", "advantages", inputs), config)
    table = read_table(bench.ledger.store, manifest)
    assert table["advantage"].to_pylist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)
    assert table["advantage"].to_pylist()[2:] == [0.0, 0.0]
    assert table["returns"].null_count == 4
    assert manifest.metrics["groups/zero_std"] == 1


def test_tables_of_other_rollouts_are_refused(bench: Any) -> None:
    inputs = record(bench, [1.0, 0.0], [[0.0] * 3] * 2)
    row = {
        "trajectory_id": "z@0/0",
        "reward": 1.0,
        "raw_reward": 1.0,
        "scorer": "h",
        "scorer_digest": "h",
        "status": "ok",
    }
    other = pa.Table.from_pylist([row], schema=REWARDS)
    inputs["rewards"] = bench.record("score_other", "rewards", other)
    with pytest.raises(ValueError, match="not made from one rollouts table"):
        _advantages(None, bench.job("advantages", "advantages", inputs), AdvantageConfig())
