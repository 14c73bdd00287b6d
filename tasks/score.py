"""score: rollouts -> rewards. A scorer that raises, hangs or returns junk marks its trajectory, never the run."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from data.columns import REWARDS
from data.config import RewardConfig, SamplingConfig
from data.digest import json_digest
from data.manifest import Manifest
from data.user_code import UserCode, load
from infra.timed_pool import Outcome, TimedPool
from ops.attempts import attempt_metrics
from ops.groups import group_numbers
from ops.metrics import reward_metrics
from ops.ragged import Ragged, from_arrow, row_sums
from ops.rewards import EnvironmentRewards, shape_truncated
from ops.verdicts import PROMPT
from tasks.outcomes import columns_of, identity, outcomes_of
from tasks.scoring import Scored
from tasks.step import Job, Pending, Run, Step, perform, unless_given

EXAMPLE_CHARACTERS = 1000
STEP = Step("score", version=1, kind="rewards")


@dataclass(frozen=True)
class Attempts:
    """Of an evaluation: how many answers each problem has, and the least reward that passes."""

    samples: int
    passing: float

    def keyed(self) -> dict[str, JsonValue]:
        """What of it enters the key; evaluations on record before it came passed at 1."""
        return {} if self.passing == 1.0 else {"pass_reward": self.passing}


@unless_given(STEP)
def score(
    run: Run, iteration: int, rollouts: Manifest | Pending, reward: RewardConfig, sampling: SamplingConfig
) -> Manifest | Pending:
    """A reward for every trajectory; NaN where the scorer failed, which is no 0."""
    return judge(run, STEP, iteration, rollouts, reward, sampling)


def judge(
    run: Run,
    step: Step,
    iteration: int,
    rollouts: Manifest | Pending,
    reward: RewardConfig,
    sampling: SamplingConfig,
    attempts: Attempts | None = None,
) -> Manifest | Pending:
    """A reward for every trajectory; also how evaluation scores, which measures avg@k and pass@k besides."""
    code = {"scorer": load(reward.scorer)} if ":" in reward.scorer else {}
    config = {"reward": reward.semantic(), "max_new_tokens": sampling.max_new_tokens}
    config |= {"judge_prompt": json_digest(PROMPT)} if reward.scorer == "judge" else {}
    config |= attempts.keyed() if attempts else {}
    return perform(
        run,
        step,
        iteration,
        {"rollouts": rollouts},
        config,
        0,
        run.worker,
        _score,
        (reward, sampling.max_new_tokens, code.get("scorer"), attempts),
        code,
    )


def _score(
    pool: TimedPool,
    job: Job,
    reward: RewardConfig,
    max_new_tokens: int,
    code: UserCode | None,
    attempts: Attempts | None = None,
) -> Manifest:
    rollouts = job.table("rollouts", ["root_id", "token_ids", *columns_of(reward)])
    outcomes = outcomes_of(pool, rollouts, reward, code)
    raw = np.array([math.nan if o.error else o.value.reward for o in outcomes], np.float64)
    mask = from_arrow(rollouts["action_mask"], "action_mask")
    truncated = np.array([status == "truncated" for status in rollouts["status"].to_pylist()])
    shaped, penalty = shape_truncated(
        raw, row_sums(mask), max_new_tokens, truncated, reward.truncated, reward.overlong_buffer, reward.overlong_factor
    )
    scorer = {"scorer": reward.scorer, "scorer_digest": identity(reward, code)}
    table = pa.Table.from_pylist(
        [
            _row(trajectory, outcome, shaped[i], penalty[i], scorer)
            for i, (trajectory, outcome) in enumerate(zip(rollouts["trajectory_id"].to_pylist(), outcomes, strict=True))
        ],
        schema=REWARDS,
    )
    if reward.per_turn:
        earned = np.isfinite(shaped) & ~(truncated & (reward.truncated == "zero"))
        table = _with_turns(table, rollouts, mask, earned)
    metrics = reward_metrics(shaped, _components(outcomes))
    if attempts is not None:
        metrics |= attempt_metrics(shaped, group_numbers(rollouts["root_id"]), attempts.samples, attempts.passing)
    attempt = job.attempt()
    attempt.add_table("rewards", table, rollouts=rollouts)
    return attempt.commit(metrics=metrics, facts={"examples": _examples(rollouts, shaped)})


def _with_turns(table: pa.Table, rollouts: pa.Table, mask: Ragged, earned: np.ndarray) -> pa.Table:
    """What environments gave for each turn, in the trajectories that keep it, [rows] bool."""
    placed = EnvironmentRewards.of(rollouts["turns"]).placed(mask, earned)
    at = table.schema.get_field_index("token_rewards")
    return table.set_column(at, table.schema.field(at), placed)


def _examples(rollouts: pa.Table, rewards: np.ndarray) -> dict[str, Any]:
    """The best and the worst trajectory, cut short, for the page of the iteration: the tables have them whole."""
    if not np.isfinite(rewards).any():
        return {}
    chosen = {"best": int(np.nanargmax(rewards)), "worst": int(np.nanargmin(rewards))}
    return {name: _example(rollouts.slice(row, 1).to_pylist()[0], rewards[row]) for name, row in chosen.items()}


def _example(row: dict[str, Any], reward: float) -> dict[str, Any]:
    messages = [
        {"role": message["role"], "content": str(message["content"])[:EXAMPLE_CHARACTERS]}
        for message in json.loads(row["messages"])
    ]
    return {"trajectory_id": row["trajectory_id"], "reward": float(reward), "messages": messages}


def _components(outcomes: list[Outcome]) -> dict[str, np.ndarray]:
    """{component: [rows] float64}, NaN where a row has none."""
    parts = [o.value.components if o.value else {} for o in outcomes]
    names = sorted({name for part in parts for name in part})
    return {name: np.array([part.get(name, math.nan) for part in parts]) for name in names}


def _row(trajectory: str, outcome: Outcome, reward: float, penalty: float, scorer: Mapping[str, str]) -> dict[str, Any]:
    scored: Scored | None = outcome.value
    return {
        "trajectory_id": trajectory,
        "reward": reward,
        "raw_reward": scored.reward if scored else math.nan,
        "length_penalty": penalty,
        "components": list(scored.components.items()) if scored else [],
        "token_rewards": None,
        **scorer,
        "status": "ok" if scored else "failed",
        "error": outcome.error,
        "extracted_answer": scored.extracted if scored else None,
        "attempts": outcome.attempts,
        "latency_ms": None,
    }
