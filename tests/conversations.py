"""Hand-made trajectories, with several turns and tools too, on record as an iteration has them."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from mlflow.entities import Trace
from mlflow.tracking import MlflowClient

from data.columns import ADVANTAGES, REWARDS, ROLLOUTS
from data.conversations import Scored
from data.ledger import Ledger
from data.manifest import Manifest
from data.request import Request
from tests.hand_made import BY_HAND

Row = dict[str, Any]
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 20, "b": 21}'}},
    {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{not json"}, "error": "no clock"},
]
PROMPT = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "20 + 21?"}]
TOOLS = [
    *PROMPT,
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c2", "content": "no clock"},
    {"role": "tool", "tool_call_id": "c1", "content": "41"},
    {"role": "assistant", "content": "41"},
]


@dataclass(frozen=True)
class Told:
    """One trajectory: spans as (role, tokens), what was said, and what it got."""

    name: str
    spans: tuple[tuple[str, int], ...]
    messages: list[Row]
    reward: float
    advantage: float = 0.0
    components: tuple[tuple[str, float], ...] = ()
    status: str = "ok"
    error: str | None = None
    score_error: str | None = None


def short(name: str, answer: str, reward: float, **more: Any) -> Told:
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
    return Told(name, (("user", 3), ("assistant", 2)), said, reward, **more)


# Groups A, B and C: right and wrong, a conversation with tools beside a failed scorer, one that never began.
CONVERSATIONS = (
    short("A/0", "4", 1.0, advantage=0.5, components=(("right", 1.0), ("brevity", -0.25))),
    short("A/1", "5", 0.0, advantage=-0.5, status="truncated"),
    Told("B/0", (("user", 4), ("assistant", 3), ("tool", 2), ("assistant", 1)), TOOLS, 0.5),
    short("B/1", "4", math.nan, score_error="ValueError: half a pair"),
    Told("C/0", (("user", 4),), PROMPT, math.nan, status="failed", error="engine: out\0of memory", score_error="none"),
)


def record(ledger: Ledger, told: tuple[Told, ...] = CONVERSATIONS) -> Scored:
    """The tables of iteration 0."""
    rollouts = _commit(ledger, "generate", "rollouts", [_rollout(t) for t in told], ROLLOUTS)
    rewards = _commit(ledger, "score", "rewards", [_reward(t) for t in told], REWARDS)
    advantages = _commit(ledger, "advantages", "advantages", [_advantage(t) for t in told], ADVANTAGES)
    return Scored(ledger.store, rollouts, rewards, advantages)


def by_trajectory(client: MlflowClient, experiment: str, run: str) -> dict[str, Trace]:
    """The traces that MLflow finds by one of its runs; fails if two are of one trajectory."""
    found = client.search_traces(locations=[experiment], run_id=run)
    named = {trace.info.tags["rollbook.trajectory"]: trace for trace in found}
    assert len(named) == len(found)
    return named


def _commit(ledger: Ledger, step: str, kind: str, rows: list[Row], schema: pa.Schema) -> Manifest:
    request = Request(step=step, step_version=1, kind=kind, inputs={}, seed=0, config={})
    attempt = ledger.writer(ledger.at(0, step), request)
    attempt.add_table(kind, pa.Table.from_pylist(rows, schema=schema))
    return attempt.commit(facts={"policy_version": 7})


def _rollout(told: Told) -> Row:
    mask = np.concatenate([np.full(length, role == "assistant") for role, length in told.spans])
    root = told.name.partition("/")[0]
    return BY_HAND | {
        "trajectory_id": told.name,
        "root_id": root,
        "parent_id": root,
        "token_ids": np.arange(len(mask)),
        "action_mask": mask,
        "rollout_logprobs": np.where(mask, -0.5, 0.0),
        "turns": _turns(told),
        "messages": json.dumps(told.messages),
        "status": told.status,
        "truncation": "length" if told.status == "truncated" else None,
        "error": told.error,
        "metadata": json.dumps({"answer": "4"}),
        "latency_ms": 100.0,
    }


def _turns(told: Told) -> list[Row]:
    turns, start, version = [], 0, 6
    for role, length in told.spans:
        spoken = role == "assistant"
        version += spoken
        calls = TOOLS[2]["tool_calls"] if told.messages is TOOLS and spoken and version == 7 else None
        turns.append(
            {
                "role": role,
                "is_generated": spoken,
                "start": start,
                "length": length,
                "text": "...",
                "finish_reason": "stop" if spoken else None,
                "policy_version": version if spoken else None,
                "policy_digest": f"p{version}" if spoken else None,
                "env_reward": None,
                "tool_calls": json.dumps(calls) if calls else None,
            }
        )
        start += length
    return turns


def _reward(told: Told) -> Row:
    failed = math.isnan(told.reward)
    return {
        "trajectory_id": told.name,
        "reward": told.reward,
        "raw_reward": told.reward,
        "length_penalty": 0.0,
        "components": list(told.components),
        "scorer": "exact",
        "scorer_digest": "builtin:exact",
        "status": "failed" if failed else "ok",
        "error": told.score_error,
        "extracted_answer": None if failed else "4",
    }


def _advantage(told: Told) -> Row:
    tokens = sum(length for _, length in told.spans)
    return {
        "trajectory_id": told.name,
        "token_rewards": [0.0] * tokens,
        "token_advantages": [0.0] * tokens,
        "returns": [0.0] * tokens,
        "loss_mask": [False] * tokens,
        "advantage": told.advantage,
        "group_id": told.name.partition("/")[0],
        "group_mean": 0.0,
        "group_std": 0.0,
        "group_finite": 1,
        "excluded": False,
        "reason": None,
    }
