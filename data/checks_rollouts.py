"""Invariants of rollouts: the spans tile the stream, and say what the policy sampled, when and how likely."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from data.arrow import pc
from data.checks import Rows
from data.columns import PURPOSES, ROLLOUT_STATUS, TRUNCATIONS
from data.ids import lineage
from ops.ragged import Ragged, offsets_of


def check_rollouts(rows: Rows) -> None:
    """Raises SchemaError for the first row that breaks a rule."""
    _check_lineage(rows)
    _check_status(rows)
    _check_tokens(rows)


def _check_lineage(rows: Rows) -> None:
    told = lineage(rows.table.column("trajectory_id"))
    for name, right in (("root_id", told.root), ("parent_id", told.parent), ("depth", told.depth)):
        column = rows.table.column(name).combine_chunks()
        same = pc.or_(pc.fill_null(pc.equal(column, right), False), pc.and_(column.is_null(), right.is_null()))
        rows.refuse(
            ~same.to_numpy(zero_copy_only=False),
            lambda row, name=name, column=column, right=right: (
                f"{name} is {column[row]}, the id says {right[row]}; derive it with data.ids.lineage"
            ),
        )


def _check_status(rows: Rows) -> None:
    rows.require_one_of("purpose", PURPOSES)
    rows.require_one_of("status", ROLLOUT_STATUS)
    rows.require_one_of("truncation", TRUNCATIONS)
    status = rows.text("status")
    rows.refuse(
        (status == "truncated") == rows.missing("truncation"),
        lambda row: (
            f"status {status[row]}, truncation {rows.text('truncation')[row]}; a truncated trajectory says by what "
            f"({', '.join(TRUNCATIONS)}), the others have null"
        ),
    )
    rows.refuse(
        (status == "failed") & rows.missing("error"), lambda _: "failed without an error; say in `error` what happened"
    )


def _check_tokens(rows: Rows) -> None:
    tokens = _token_column(rows, "token_ids")
    mask, logprobs = _token_column(rows, "action_mask"), _token_column(rows, "rollout_logprobs")
    rows.require_equal_lengths({"token_ids": tokens, "action_mask": mask, "rollout_logprobs": logprobs})
    rows.refuse_tokens(
        tokens.values < 0, tokens, lambda row, at: f"token_ids[{at}] is {tokens.row(row)[at]}; ids start at 0"
    )
    spans = Spans.of(rows)
    _check_tiling(rows, spans, tokens)
    _check_actions(rows, spans, mask)
    _check_logprobs(rows, logprobs, mask)
    _check_producers(rows, spans)


def _token_column(rows: Rows, name: str) -> Ragged:
    column = rows.tokens(name)
    assert column is not None, name  # required by the schema, and checked before
    return column


@dataclass(frozen=True)
class Spans:
    """The turns of all rows, one after the other."""

    flat: pa.ChunkedArray  # [spans] struct
    offsets: np.ndarray  # [rows + 1] int64, into spans

    @classmethod
    def of(cls, rows: Rows) -> "Spans":
        """Refuses a null span, and a null start, length, role or is_generated."""
        turns = rows.table.column("turns")
        offsets = offsets_of(pc.list_value_length(turns).to_numpy())
        spans = cls(pc.list_flatten(turns), offsets)
        spans.refuse(rows, spans.flat.is_null().to_numpy(), "is null; leave it out")
        for name in ("role", "is_generated", "start", "length"):
            missing = pc.struct_field(spans.flat, name).is_null().to_numpy()
            spans.refuse(rows, missing, f"has no {name}; every span needs one")
        return spans

    def refuse(self, rows: Rows, bad: np.ndarray, rule: str) -> None:
        """bad [spans] bool"""
        over = Ragged(bad, self.offsets)
        rows.refuse_tokens(bad, over, lambda _, at: f"turns[{at}] {rule}")

    def field(self, name: str) -> np.ndarray:
        return pc.struct_field(self.flat, name).to_numpy()

    @cached_property
    def generated(self) -> np.ndarray:
        """[spans] bool"""
        return self.field("is_generated").astype(bool)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[spans] int64, tokens"""
        return self.field("length").astype(np.int64)

    @cached_property
    def first(self) -> np.ndarray:
        """[spans] bool: the first of its row"""
        first = np.zeros(len(self.flat), bool)
        first[self.offsets[:-1][np.diff(self.offsets) > 0]] = True
        return first


def _check_tiling(rows: Rows, spans: Spans, tokens: Ragged) -> None:
    spans.refuse(rows, spans.lengths < 0, "has a negative length; spans tile the stream")
    before = offsets_of(spans.lengths)
    covered = np.diff(before[spans.offsets])
    rows.refuse(
        covered != tokens.lengths,
        lambda row: (
            f"turns cover {covered[row]} of {tokens.lengths[row]} tokens; spans tile the stream without gap: add the "
            "missing span or mend its length"
        ),
    )
    row_start = np.repeat(tokens.offsets[:-1], np.diff(spans.offsets))
    wrong = spans.field("start") != before[:-1] - row_start
    spans.refuse(rows, wrong, "does not start where the one before ends; spans tile the stream without gap or overlap")
    rows.refuse(
        np.diff(spans.offsets) == 0, lambda _: "no turns; a trajectory that failed at once still has its prompt span"
    )
    spans.refuse(rows, spans.first & spans.generated, "is generated; the first span is the prompt")
    again = ~spans.first & ~spans.generated & ~np.concatenate([[False], spans.generated[:-1]])
    spans.refuse(rows, again, "follows a span that is not generated either; join the two")


def _check_actions(rows: Rows, spans: Spans, mask: Ragged) -> None:
    sampled = np.repeat(spans.generated, spans.lengths)
    rows.refuse_tokens(
        mask.values.astype(bool) != sampled,
        mask,
        lambda row, at: (
            f"action_mask[{at}] is {bool(mask.row(row)[at])}, but the span says is_generated = "
            f"{bool(sampled[mask.offsets[row] + at])}; the mask is true exactly where the policy sampled"
        ),
    )


def _check_logprobs(rows: Rows, logprobs: Ragged, mask: Ragged) -> None:
    rows.require_finite("rollout_logprobs", logprobs)
    rows.refuse_tokens(
        logprobs.values > 0,
        logprobs,
        lambda row, at: f"rollout_logprobs[{at}] is {logprobs.row(row)[at]}; a log-prob is at most 0, in nats",
    )
    rows.require_zero_outside("rollout_logprobs", logprobs, mask, "at a token that was not sampled")


def _check_producers(rows: Rows, spans: Spans) -> None:
    for name in ("policy_version", "policy_digest"):
        missing = spans.generated & pc.struct_field(spans.flat, name).is_null().to_numpy()
        spans.refuse(rows, missing, f"is generated without {name}; record which policy wrote it")
    version = pc.fill_null(pc.struct_field(spans.flat, "policy_version"), 0).to_numpy()
    spans.refuse(rows, version < 0, "has a negative policy_version; it counts optimizer updates from 0")
    current = rows.policy_version
    if current is not None:
        spans.refuse(rows, version > current, f"is by a policy later than the current one, {current}; sync the engine")
    semantics = pc.struct_field(rows.table.column("sampling"), "logprob_semantics").is_null().to_numpy()
    rows.refuse(semantics, lambda _: "sampling.logprob_semantics is null; say of which distribution the log-probs are")
