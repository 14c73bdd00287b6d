"""Invariants of rewards, replays and advantages."""

import numpy as np

from data.checks import Rows
from data.columns import REWARD_STATUS
from ops.ragged import Ragged


def check_rewards(rows: Rows) -> None:
    """Null, NaN and 0 are three states: status says which. Raises SchemaError for the first row that breaks a rule."""
    rows.require_one_of("status", REWARD_STATUS)
    reward, unscored = rows.numbers("reward"), rows.missing("reward")
    state = np.where(unscored, "unscored", np.where(np.isnan(reward), "failed", "ok"))
    status = rows.text("status")
    rows.refuse(
        state != status,
        lambda row: (
            f"reward {'null' if unscored[row] else reward[row]} with status {status[row]}; null is unscored, NaN is "
            "failed, a number is ok: a failure is never 0"
        ),
    )
    rows.refuse(np.isinf(reward), lambda row: f"reward is {reward[row]}; it must be finite, or NaN with status failed")
    rows.refuse(
        (status == "failed") & rows.missing("error"), lambda _: "failed without an error; say in `error` what happened"
    )
    token_rewards = rows.tokens("token_rewards")
    rows.require_equal_lengths({"token_rewards": token_rewards})
    if token_rewards is not None:
        _check_token_rewards(rows, token_rewards, np.isnan(reward))


def _check_token_rewards(rows: Rows, token_rewards: Ragged, no_reward: np.ndarray) -> None:
    """They are parts of the reward: where there is none, there are no parts. no_reward: [rows] bool"""
    rows.require_finite("token_rewards", token_rewards)
    if rows.action_mask is not None:
        rows.require_zero_outside("token_rewards", token_rewards, rows.action_mask, "at a token that is not an action")
    rows.refuse_tokens(
        (token_rewards.values != 0) & np.repeat(no_reward, token_rewards.lengths),
        token_rewards,
        lambda row, at: (
            f"token_rewards[{at}] is {token_rewards.row(row)[at]} without a reward; they are parts of it: fill with 0"
        ),
    )


def check_replays(rows: Rows) -> None:
    """Raises SchemaError for the first row that breaks a rule."""
    names = ("old_logprobs", "values", "ref_logprobs", "entropy")
    columns = {name: rows.tokens(name) for name in names}
    rows.require_equal_lengths(columns)
    for name, column in columns.items():
        if column is not None:
            rows.require_finite(name, column)
            if rows.action_mask is not None:
                rows.require_zero_outside(name, column, rows.action_mask, "at a token that is not an action")
    for name in ("old_logprobs", "ref_logprobs"):
        if (column := columns[name]) is not None:
            _require_logprobs(rows, name, column)


def check_advantages(rows: Rows) -> None:
    """Raises SchemaError for the first row that breaks a rule."""
    names = ("token_rewards", "token_advantages", "returns", "loss_mask")
    columns = {name: rows.tokens(name) for name in names}
    rows.require_equal_lengths(columns)
    for name, column in columns.items():
        if column is not None:
            rows.require_finite(name, column)
            if rows.action_mask is not None:
                rows.require_zero_outside(name, column, rows.action_mask, "at a token that is not an action")
    scalar = rows.numbers("advantage")
    rows.refuse(~np.isfinite(scalar), lambda row: f"advantage is {scalar[row]}; it must be finite, 0 if excluded")
    _check_excluded(rows, columns)


def _check_excluded(rows: Rows, columns: dict[str, Ragged | None]) -> None:
    excluded = rows.table.column("excluded").to_numpy()
    for name in ("loss_mask", "token_advantages"):
        column = columns[name]
        if column is not None:
            rows.refuse_tokens(
                (column.values != 0) & np.repeat(excluded, column.lengths),
                column,
                lambda row, at, name=name: f"excluded, but {name}[{at}] is not 0; an excluded row enters nothing",
            )
    rows.refuse(excluded & rows.missing("reason"), lambda _: "excluded without a reason; say why in `reason`")


def _require_logprobs(rows: Rows, name: str, column: Ragged) -> None:
    rows.refuse_tokens(
        column.values > 0,
        column,
        lambda row, at: f"{name}[{at}] is {column.row(row)[at]}; a log-prob is at most 0, in nats",
    )
