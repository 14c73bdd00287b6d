"""Every invariant of rollouts, broken once: the error names the trajectory, the value and the rule."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from data.columns import ROLLOUTS, SAMPLING
from data.schema import SchemaError, conform, validate

Row = dict[str, Any]


def check(rows: list[Row], **known: Any) -> None:
    validate("rollouts", conform("rollouts", pa.Table.from_pylist(rows, schema=ROLLOUTS)), **known)


def test_the_worked_example_holds(rollout_rows: list[Row]):
    check(rollout_rows, policy_version=3)


def test_an_empty_table_holds():
    check([])


def test_a_trajectory_that_failed_at_once_has_only_its_prompt(rollout_rows: list[Row]):
    row = rollout_rows[0]
    row |= {
        "token_ids": [1, 2, 3],
        "action_mask": [False] * 3,
        "rollout_logprobs": [0.0] * 3,
        "turns": row["turns"][:1],
    }
    row |= {"status": "failed", "error": "the tool server is down"}
    check(rollout_rows)


def test_a_trajectory_may_go_on_under_another_policy(rollout_rows: list[Row]):
    first = rollout_rows[0]["turns"][1] | {"length": 2, "policy_version": 2}
    rollout_rows[0]["turns"][1:] = [first, first | {"start": 5, "length": 1, "policy_version": 3}]
    check(rollout_rows)


def edit(number: int, **values: Any) -> Callable[[list[Row]], None]:
    return lambda rows: rows[number].update(values)


def edit_turn(number: int, turn: int, **values: Any) -> Callable[[list[Row]], None]:
    return lambda rows: rows[number]["turns"][turn].update(values)


def drop_turn(number: int, turn: int) -> Callable[[list[Row]], None]:
    return lambda rows: rows[number]["turns"].pop(turn)


BROKEN = {
    "twice": (edit(1, trajectory_id="A/0"), "A/0", "occurs twice"),
    "apart": (
        lambda rows: rows.insert(4, rows.pop(0)),
        "A/0",
        "its root has rows before, apart from it; .*sort the rows",
    ),
    "leading zero": (edit(1, trajectory_id="A/01"), "A/01", "a root without '/'"),
    "no root": (edit(0, trajectory_id="/0"), "/0", "a root without '/'"),
    "root": (edit(0, root_id="B"), "A/0", "root_id is B, the id says A"),
    "parent": (edit(1, parent_id="A/0"), "A/1", "parent_id is A/0, the id says A"),
    "no parent": (edit(1, parent_id=None), "A/1", "parent_id is null|None, the id says A"),
    "depth": (edit(2, depth=2), "B/0", "depth is 2, the id says 1"),
    "null": (edit(2, engine=None), "B/0", "engine is null; it is required"),
    "null list": (edit(2, token_ids=None), "B/0", "token_ids is null; it is required"),
    "purpose": (edit(0, purpose="test"), "A/0", "purpose is 'test'; it must be one of train, baseline, eval"),
    "status": (edit(0, status="done"), "A/0", "status is 'done'; it must be one of ok, truncated, failed, carried"),
    "truncation": (edit(1, truncation="tired"), "A/1", "truncation is 'tired'; it must be one of length, max_turns"),
    "truncated by what": (edit(1, truncation=None), "A/1", "status truncated, truncation None"),
    "not truncated": (edit(0, truncation="length"), "A/0", "status ok, truncation length"),
    "failed why": (edit(3, status="failed"), "B/1", "failed without an error"),
    "fewer log-probs": (edit(1, rollout_logprobs=[0.0, -1.0]), "A/1", "2 rollout_logprobs for 5 token_ids"),
    "longer mask": (edit(3, action_mask=[False, False, True, True, True]), "B/1", "5 action_mask for 4 token_ids"),
    "shift between rows": (
        # As many in all, so that only the boundary between rows is wrong.
        lambda rows: (edit(0, action_mask=[False] * 3 + [True] * 2)(rows), edit(1, action_mask=[True] * 6)(rows)),
        "A/0",
        "5 action_mask for 6 token_ids",
    ),
    "null token": (edit(2, token_ids=[5, 6, 20, None, 2, 30, 31, 32, 40, 2]), "B/0", r"token_ids\[3\] is null"),
    "negative token": (edit(1, token_ids=[1, 2, -3, 7, 9]), "A/1", r"token_ids\[2\] is -3"),
    "gap": (drop_turn(2, 2), "B/0", "turns cover 7 of 10 tokens"),
    "long span": (edit_turn(1, 1, length=3), "A/1", "turns cover 6 of 5 tokens"),
    "overlap": (edit_turn(2, 2, start=4), "B/0", r"turns\[2\] does not start where the one before ends"),
    "late prompt": (edit_turn(1, 0, start=1), "A/1", r"turns\[0\] does not start"),
    "negative span": (edit_turn(0, 1, length=-3), "A/0", r"turns\[1\] has a negative length"),
    "null span": (lambda rows: rows[2]["turns"].__setitem__(3, None), "B/0", r"turns\[3\] is null"),
    "no start": (edit_turn(2, 1, start=None), "B/0", r"turns\[1\] has no start"),
    "no role": (edit_turn(2, 3, role=None), "B/0", r"turns\[3\] has no role"),
    "no sign": (edit_turn(2, 3, is_generated=None), "B/0", r"turns\[3\] has no is_generated"),
    "no prompt": (edit_turn(3, 0, is_generated=True), "B/1", r"turns\[0\] is generated; the first span is the prompt"),
    "split observation": (
        lambda rows: rows[2]["turns"].__setitem__(3, rows[2]["turns"][2] | {"start": 8, "length": 2}),
        "B/0",
        r"turns\[3\] follows a span that is not generated either",
    ),
    "mask in observation": (
        edit(2, action_mask=[False] * 2 + [True] * 4 + [False] * 2 + [True] * 2),
        "B/0",
        r"action_mask\[5\] is True, but the span says is_generated = False",
    ),
    "first answer token masked out": (
        edit(0, action_mask=[False] * 4 + [True] * 2),
        "A/0",
        r"action_mask\[3\] is False, but the span says is_generated = True",
    ),
    "NaN log-prob": (edit(1, rollout_logprobs=[0, 0, 0, -1, float("nan")]), "A/1", r"rollout_logprobs\[4\] is nan"),
    "infinite": (edit(1, rollout_logprobs=[0, 0, 0, -1, -float("inf")]), "A/1", r"rollout_logprobs\[4\] is -inf"),
    "positive": (edit(1, rollout_logprobs=[0, 0, 0, 0.25, -1]), "A/1", r"rollout_logprobs\[3\] is 0.25; .* at most 0"),
    "log-prob of the prompt": (edit(3, rollout_logprobs=[0, -1, -1, -1]), "B/1", r"rollout_logprobs\[1\] is -1.0 at a"),
    "no version": (edit_turn(2, 3, policy_version=None), "B/0", r"turns\[3\] is generated without policy_version"),
    "no digest": (edit_turn(2, 1, policy_digest=None), "B/0", r"turns\[1\] is generated without policy_digest"),
    "negative version": (edit_turn(2, 1, policy_version=-1), "B/0", r"turns\[1\] has a negative policy_version"),
    "later version": (edit_turn(2, 3, policy_version=4), "B/0", r"turns\[3\] is by a policy later than the current"),
    "semantics": (lambda rows: rows[0]["sampling"].update(logprob_semantics=None), "A/0", "logprob_semantics is null"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(case: str, rollout_rows: list[Row]):
    spoil, trajectory, rule = BROKEN[case]
    spoil(rollout_rows)
    with pytest.raises(SchemaError, match=rf"rollouts: trajectory {trajectory}: .*(?:{rule})"):
        check(rollout_rows, policy_version=3)


def test_how_many_rows_break_a_rule_is_said(rollout_rows: list[Row]):
    for row in rollout_rows[1:]:
        row["purpose"] = "test"
    with pytest.raises(SchemaError, match=r"trajectory A/1: .*\(3 rows in all\)"):
        check(rollout_rows)


def test_sliced_and_chunked_tables_are_checked_alike(rollouts: pa.Table):
    for table in (rollouts.slice(2), pa.concat_tables([rollouts.slice(0, 1), rollouts.slice(1)])):
        validate("rollouts", table)
    mask = pa.array([[True], [False] * 5, [False] * 10, [False] * 4], pa.list_(pa.bool_()))
    bad = rollouts.set_column(7, ROLLOUTS.field("action_mask"), mask)
    with pytest.raises(SchemaError, match="trajectory B/0: action_mask"):
        validate("rollouts", bad.slice(2))


def test_conform_fills_optional_columns_and_orders_the_rest(rollouts: pa.Table):
    partial = rollouts.drop_columns(["error", "media", "started_at"])
    shuffled = partial.select(partial.column_names[::-1])
    table = conform("rollouts", shuffled)
    assert table.schema == ROLLOUTS
    assert table.column("media").null_count == 4
    assert table.column("token_ids").to_pylist()[1] == [1, 2, 3, 7, 9]


def test_conform_converts_plain_text_and_wider_numbers(rollout_rows: list[Row]):
    # What inference makes of a sampling struct has another type for its empty list, so that one is given.
    sampling = pa.array([row.pop("sampling") for row in rollout_rows], SAMPLING)
    plain = pa.Table.from_pylist(rollout_rows).append_column("sampling", sampling)
    assert plain.schema.field("depth").type == pa.int64()
    assert plain.schema.field("purpose").type == pa.string()
    table = conform("rollouts", plain)
    assert table.schema == ROLLOUTS
    validate("rollouts", table)
    assert table.column("purpose").to_pylist() == ["train"] * 4


def test_a_missing_column_is_named(rollouts: pa.Table):
    with pytest.raises(SchemaError, match="rollouts: column 'engine' is missing; it is required"):
        conform("rollouts", rollouts.drop_columns(["engine"]))


def test_an_unknown_column_is_named_with_the_nearest(rollouts: pa.Table):
    with pytest.raises(SchemaError, match="unknown column 'token_id'; did you mean 'token_ids'"):
        conform("rollouts", rollouts.rename_columns({"token_ids": "token_id"}))
    with pytest.raises(SchemaError, match="unknown kind of table 'rollout'; did you mean 'rollouts'"):
        conform("rollout", rollouts)


def test_a_type_that_does_not_convert_is_named(rollouts: pa.Table):
    wide = pa.array([[2**40]] * 4, pa.list_(pa.int64()))
    with pytest.raises(SchemaError, match=r"column 'token_ids' is list<.*int64>, must be list<.*int32>"):
        conform("rollouts", rollouts.set_column(6, "token_ids", wide))


def test_validate_wants_a_conformed_table(rollouts: pa.Table):
    with pytest.raises(SchemaError, match="call conform first"):
        validate("rollouts", rollouts.select(["trajectory_id"]))
