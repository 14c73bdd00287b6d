"""A trajectory that was played as a row of the rollouts table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from data.config import SamplingConfig
from data.ids import root_of
from models.agents.loop import Trajectory
from models.agents.stream import Span, Stream
from models.environments.contract import ToolCall

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Producer:
    """What made the rows of one call."""

    engine: str
    engine_version: str
    logprob_semantics: str
    tokenizer: "Tokenizer"
    sampling: SamplingConfig


def row(trajectory: Trajectory, purpose: str, producer: Producer, started: datetime) -> dict[str, Any]:
    """One row of data.columns.ROLLOUTS; token for token what the engine consumed and emitted."""
    stream, sampling, root = trajectory.stream, producer.sampling, root_of(trajectory.name)
    return {
        "trajectory_id": trajectory.name,
        "root_id": root,
        "parent_id": root,
        "depth": 1,
        "stage": "policy",
        "purpose": purpose,
        "token_ids": stream.token_ids,
        "action_mask": stream.action_mask,
        "rollout_logprobs": stream.logprobs,
        "turns": [_turn(span, stream, producer.tokenizer) for span in stream.spans],
        "messages": json.dumps(stream.messages, ensure_ascii=False),
        "media": [],
        "status": trajectory.status,
        "truncation": trajectory.truncation,
        "error": trajectory.error,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": trajectory.episode.seed,
            "stop": sampling.stop,
            "logprob_semantics": producer.logprob_semantics,
        },
        "engine": producer.engine,
        "engine_version": producer.engine_version,
        "tokenizer_digest": producer.tokenizer.digest,
        "template_digest": producer.tokenizer.template_digest,
        "metadata": json.dumps(trajectory.episode.metadata, ensure_ascii=False),
        "started_at": started,
        "latency_ms": 1000.0 * trajectory.seconds,
    }


def _turn(span: Span, stream: Stream, tokenizer: "Tokenizer") -> dict[str, Any]:
    return {
        "role": span.role,
        "is_generated": span.is_generated,
        "start": span.start,
        "length": span.length,
        "text": tokenizer.decode(stream.ids_of(span).tolist()),
        "finish_reason": span.finish_reason,
        "policy_version": span.policy_version,
        "policy_digest": span.policy_digest,
        "env_reward": span.env_reward,
        "tool_calls": _calls(span.tool_calls),
    }


def _calls(calls: Sequence[ToolCall]) -> str | None:
    made = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return json.dumps(made, ensure_ascii=False) if made else None
