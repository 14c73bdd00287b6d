"""What a report holds, on the worked example and where there is too much of it."""

from pathlib import Path
from typing import Any

import pytest

from data.ledger import Ledger
from data.report import Budget, report
from data.strips import ENDS, FAILED, choose
from data.trajectories import Trajectories, read_trajectories
from tests.reports import record_example


@pytest.fixture
def example(ledger: Ledger, tmp_path: Path) -> Trajectories:
    return read_trajectories(ledger, record_example(ledger, tmp_path))


def test_worst_best_failed_and_groups(example: Trajectories) -> None:
    """Rewards 1 0 1 NaN: A/1 is the worst; of two best the first comes first; what has no reward is neither."""
    assert example.worst(2) == [1, 0] and example.best(9) == [0, 2, 1]
    assert example.failed() == [3] and example.statuses == ["ok", "truncated", "ok", "not scored"]
    assert example.group("B") == [2, 3] and example.references == ["42"] * 4
    with pytest.raises(LookupError, match="group 'C': not in this iteration; its groups are A, B"):
        example.group("C")


def test_the_worked_example(ledger: Ledger, tmp_path: Path) -> None:
    """B/0: two prompt tokens, three sampled, three of a tool, two sampled; 20 and 21 are é together."""
    found = report(ledger, record_example(ledger, tmp_path))
    strip = found["strips"]["2"]
    assert strip["ids"] == [5, 6, 20, 21, 2, 30, 31, 32, 40, 2] and strip["mask"] == "··111···11"
    assert strip["values"] == [0.1, 0.2, 0.3, 0.4, 0.6] and strip["gap"] == [0.25] * 5
    assert strip["token_advantages"] == [0.7825, 0.7185, 0.651, 0.58, 0.4]
    assert strip["spelled"] == {"2": "é", "3": ""} and found["words"]["30"] == " "
    assert found["strips"]["3"]["mask"] == "··00"  # excluded: in no loss
    rows = found["rows"]
    assert (
        rows["reward"] == [1.0, 0.0, 1.0, None] and rows["length"] == [3, 2, 5, 2] and rows["stream"] == [6, 5, 10, 4]
    )
    assert rows["group"] == [0, 0, 1, 1] and rows["branch"] == ["/0", "/1", "/0", "/1"]
    assert rows["error"] == {"texts": ["timeout after 10 s"], "at": [None, None, None, 0]}
    assert rows["excluded"] == [None, None, None, "not scored"] and rows["components"] == {"match": [0.5] * 4}
    assert found["groups"] == {"root": ["A", "B"], "mean": [0.5, 1.0], "std": [0.5, 0.0], "finite": [2, 1]}
    texts = found["texts"]
    assert [[turn[0], turn[1], turn[2], texts[turn[3]]] for turn in found["turns"][2]] == [
        ["user", 0, 2, "..."],
        ["assistant", 1, 3, "..."],
        ["user", 0, 3, "..."],
        ["assistant", 1, 2, "said last"],
    ]


def test_a_gap_that_was_not_measured_is_left_out(ledger: Ledger, tmp_path: Path) -> None:
    summary = record_example(ledger, tmp_path)
    replay = summary.manifests["replay"]
    refused = replay.model_copy(update={"facts": {"mismatch": {"measured": False, "reason": "top-p"}}})
    summary = type(summary)(0, {**summary.manifests, "replay": refused}, None)
    found = report(ledger, summary)
    assert found["gap_refused"] == "top-p" and "gap" not in found["strips"]["2"]


def test_an_iteration_that_has_only_generated(ledger: Ledger, tmp_path: Path) -> None:
    summary = record_example(ledger, tmp_path)
    summary = type(summary)(0, {"generate": summary.manifests["generate"]}, None)
    found = report(ledger, summary)
    assert found["rows"]["reward"] == [None] * 4 and found["strips"]["2"]["rollout_logprobs"] == [-0.5] * 5
    assert found["strips"]["2"].keys() == {"ids", "mask", "rollout_logprobs", "spelled"}
    with pytest.raises(LookupError, match="iteration 0 of 'sort': has no trajectories on record yet"):
        report(ledger, type(summary)(0, {}, None))


def test_what_is_long_is_cut_and_counted(ledger: Ledger, tmp_path: Path) -> None:
    """Ten tokens of which eight fit: six of the beginning, two of the end. Of 60 bytes 48 are left to the 1,000."""
    summary = record_example(ledger, tmp_path, {"A/0": "w" * 1000})
    found = report(ledger, summary, Budget(text_bytes=60, tokens_of_one=8))
    strip = found["strips"]["2"]
    assert strip["ids"] == [5, 6, 20, 21, 2, 30, 40, 2] and strip["cut"] == [6, 2] and strip["mask"] == "··111·11"
    assert found["texts"] == ["...", ("w" * 32, 952, "w" * 16), "said last"]
    assert "cut" not in found["strips"]["0"]


@pytest.mark.parametrize(
    ("room", "rows"), [(25, [0, 1, 2, 3]), (21, [0, 1, 2]), (15, [0, 1, 3]), (11, [0, 1]), (4, [3])]
)
def test_the_sample(example: Trajectories, room: int, rows: list[int]) -> None:
    """6, 5, 10 and 4 tokens. The order: A/1, A/0, B/0 by reward from the worst; from the best; then B/1, which failed.

    21: 5 + 6 + 10 leave none for B/1. 15: 5 + 6, then B/1's 4. 11: 5 + 6. 4: B/1 alone.
    """
    assert choose(example, room, 100) == rows


def test_there_is_room_for_those_that_are_always_shown() -> None:
    assert (2 * ENDS + FAILED) * Budget().tokens_of_one <= Budget().tokens


def test_groups_are_taken_whole_and_over_the_whole_iteration(many_rollouts: Any) -> None:
    """100 groups of 6 + 5 tokens, none scored: of 110 tokens ten groups, two or three in each quarter."""
    found = Trajectories({"rollouts": many_rollouts(100)})
    rows = choose(found, 110, 100)
    groups = [row // 2 for row in rows]
    assert len(rows) == 20 and all(groups.count(group) == 2 for group in groups)
    assert all(2 <= len({g for g in groups if g // 25 == quarter}) <= 3 for quarter in range(4))
