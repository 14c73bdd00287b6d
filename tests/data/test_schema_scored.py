"""Invariants of rewards, replays and advantages, alone and against the rollouts that they speak of."""

from typing import Any

import pyarrow as pa
import pytest

from data.columns import ADVANTAGES, REPLAYS, REWARDS
from data.schema import SchemaError, conform, validate

Row = dict[str, Any]
NAN = float("nan")
SCHEMAS = {"rewards": REWARDS, "replays": REPLAYS, "advantages": ADVANTAGES}
IDS = ("A/0", "A/1", "B/0", "B/1")


def check(kind: str, rows: list[Row], **known: Any) -> pa.Table:
    table = conform(kind, pa.Table.from_pylist(rows, schema=SCHEMAS[kind]))
    validate(kind, table, **known)
    return table


@pytest.fixture
def rewards() -> list[Row]:
    rows = [{"trajectory_id": i, "reward": r, "raw_reward": r} for i, r in zip(IDS, (1.0, 0.0, 1.0, NAN), strict=True)]
    common = {"scorer": "exact", "scorer_digest": "s", "status": "ok", "components": [("match", 1.0)]}
    rows = [row | common for row in rows]
    rows[3] |= {"status": "failed", "error": "timeout after 10 s"}
    # B/0 earned .25 of its 1 in its first turn.
    parts = ([0] * 6, [0] * 5, [0] * 4 + [0.25] + [0] * 5, [0] * 4)
    for row, tokens in zip(rows, parts, strict=True):
        row["token_rewards"] = tokens
    return rows


@pytest.fixture
def replays() -> list[Row]:
    # Values of the worked example at the action tokens.
    values = ([0, 0, 0, 0.2, 0.5, 0.8], [0, 0, 0, 0.2, 0.4], [0, 0, 0.1, 0.2, 0.3, 0, 0, 0, 0.4, 0.6], [0, 0, 0.1, 0.1])
    common = {"policy_digest": "p3", "mini_batch": 0, "micro_batch": 0}
    return [
        {"trajectory_id": i, "values": v, "old_logprobs": [-0.5 if x else 0 for x in v]} | common
        for i, v in zip(IDS, values, strict=True)
    ]


@pytest.fixture
def advantages() -> list[Row]:
    # A, R and the terminal reward of the worked example.
    numbers = {
        "A/0": ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0.7655, 0.49, 0.2], [0, 0, 0, 0.9655, 0.99, 1]),
        "A/1": ([0] * 5, [0, 0, 0, -0.18, -0.4], [0, 0, 0, 0.02, 0]),
        "B/0": (
            [0] * 9 + [1],
            [0, 0, 0.7825, 0.7185, 0.651, 0, 0, 0, 0.58, 0.4],
            [0, 0, 0.8825, 0.9185, 0.951, 0, 0, 0, 0.98, 1],
        ),
        "B/1": ([0] * 4, [0] * 4, [0] * 4),
    }
    rows = []
    for name, (rewarded, advantage, returns) in numbers.items():
        row: Row = {"trajectory_id": name, "group_id": name[0], "group_finite": 2 if name[0] == "A" else 1}
        row |= {"token_rewards": rewarded, "token_advantages": advantage, "returns": returns}
        row |= {"loss_mask": [a != 0 for a in advantage], "advantage": 0.0, "excluded": name == "B/1"}
        rows.append(row | {"reason": "scorer failed" if name == "B/1" else None})
    return rows


def test_the_worked_example_holds(rollouts: pa.Table, rewards: list[Row], replays: list[Row], advantages: list[Row]):
    table = check("rewards", rewards, rollouts=rollouts)
    assert [str(r) for r in table.column("reward").to_pylist()] == ["1.0", "0.0", "1.0", "nan"]  # NaN survives
    check("replays", replays, rollouts=rollouts)
    check("advantages", advantages, rollouts=rollouts)


def test_rows_in_another_order_than_the_rollouts_meet_their_own_stream(rollouts: pa.Table, advantages: list[Row]):
    check("advantages", [advantages[i] for i in (3, 2, 1, 0)], rollouts=rollouts)
    check("advantages", advantages[2:], rollouts=rollouts)


def test_optional_columns_may_be_absent(replays: list[Row], advantages: list[Row], rollouts: pa.Table):
    for row in replays:
        row["values"] = None
    assert check("replays", replays, rollouts=rollouts).column("values").null_count == 4
    for row in advantages:
        row["returns"] = None
    check("advantages", advantages, rollouts=rollouts)


BROKEN = {
    "0 for a failure": ("rewards", 3, {"reward": 0.0}, "reward 0.0 with status failed; .*a failure is never 0"),
    "NaN called ok": ("rewards", 0, {"reward": NAN}, "reward nan with status ok; null is unscored, NaN is failed"),
    "null called ok": ("rewards", 0, {"reward": None}, "reward null with status ok"),
    "NaN called unscored": ("rewards", 3, {"status": "unscored"}, "reward nan with status unscored"),
    "status": ("rewards", 0, {"status": "fine"}, "status is 'fine'; it must be one of ok, failed, unscored"),
    "infinite": ("rewards", 0, {"reward": float("inf")}, "reward is inf; it must be finite"),
    "failed why": ("rewards", 3, {"error": None}, "failed without an error"),
    "some token rewards": ("rewards", 1, {"token_rewards": None}, "token_rewards is null, but others have it"),
    "parts of no reward": (
        "rewards",
        3,
        {"token_rewards": [0.0, 0.0, 0.5, 0.0]},
        r"token_rewards\[2\] is 0.5 without a reward; they are parts of it",
    ),
    "reward at an observation": (
        "rewards",
        2,
        {"token_rewards": [0.0] * 5 + [0.5] + [0.0] * 4},
        r"token_rewards\[5\] is 0.5 at a token that is not an action",
    ),
    "scorer": ("rewards", 2, {"scorer": None}, "scorer is null; it is required"),
    "short values": ("replays", 2, {"values": [0.0] * 9}, "9 values for 10 rollouts.token_ids"),
    "NaN value": ("replays", 1, {"values": [0, 0, 0, NAN, 0]}, r"values\[3\] is nan; it must be finite"),
    "value at a prompt": ("replays", 1, {"values": [0, 0.5, 0, 0, 0]}, r"values\[1\] is 0.5 at a token that is not an"),
    "log-prob above 0": ("replays", 3, {"old_logprobs": [0, 0, 0.5, 0]}, r"old_logprobs\[2\] is 0.5; .* at most 0"),
    "values of some": ("replays", 0, {"values": None}, "values is null, but others have it"),
    "null token": ("replays", 1, {"values": [0, 0, 0, None, 0]}, r"values\[3\] is null"),
    "loss on the prompt": (
        "advantages",
        1,
        {"loss_mask": [False, True, False, True, True]},
        r"loss_mask\[1\] is True at a token that is not an action; it must be 0 there",
    ),
    "advantage at an observation": (
        "advantages",
        2,
        {"token_advantages": [0, 0, 0.78, 0.71, 0.65, 0.1, 0, 0, 0.5, 0.4]},
        r"token_advantages\[5\] is 0.1\d* at a token that is not an action",
    ),
    "infinite advantage": ("advantages", 0, {"advantage": float("inf")}, "advantage is inf; it must be finite"),
    "loss on an excluded row": (
        "advantages",
        3,
        {"loss_mask": [False, False, True, True]},
        r"excluded, but loss_mask\[2\] is not 0",
    ),
    "excluded why": ("advantages", 3, {"reason": None}, "excluded without a reason"),
    "short mask": ("advantages", 0, {"loss_mask": [False] * 5}, "5 loss_mask for 6 rollouts.token_ids"),
    "stranger": ("advantages", 3, {"trajectory_id": "B/7"}, "not in the rollouts"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(case: str, rollouts: pa.Table, request: pytest.FixtureRequest):
    kind, number, change, rule = BROKEN[case]
    rows = request.getfixturevalue(kind)
    rows[number] |= change
    named = rows[number]["trajectory_id"]
    with pytest.raises(SchemaError, match=rf"{kind}: trajectory {named}: .*{rule}"):
        check(kind, rows, rollouts=rollouts)


def test_lengths_are_compared_among_themselves_without_rollouts(advantages: list[Row]):
    advantages[1]["returns"] = [0.0] * 4
    with pytest.raises(SchemaError, match="trajectory A/1: 4 returns for 5 token_rewards"):
        check("advantages", advantages)
