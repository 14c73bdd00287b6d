"""One trajectory's tokens. A stream only grows: what was sampled or shown is never tokenised again, nor changed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from models.engines.contract import Completion
from models.environments.contract import Message, ToolCall


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one producer. What only a turn of the policy has is None for what it was shown."""

    role: str
    start: int  # index into the stream
    length: int  # tokens
    finish_reason: str | None = None
    policy_version: int | None = None  # optimizer updates
    policy_digest: str | None = None
    env_reward: float | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def is_generated(self) -> bool:
        return self.policy_digest is not None


@dataclass
class Stream:
    """Grows by `show` and `say`, in turns; both take token ids as they are."""

    messages: list[Message] = field(default_factory=list)  # the conversation so far, for templates and people
    tools: Sequence[Message] = ()
    spans: list[Span] = field(default_factory=list)
    _ids: list[np.ndarray] = field(default_factory=list)
    _logprobs: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return self.spans[-1].start + self.spans[-1].length if self.spans else 0

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "Stream":
        """As it was when it was stored: a row of data.columns.ROLLOUTS as plain values."""
        spans = [_span(turn) for turn in row["turns"]]
        ids, logprobs = np.asarray(row["token_ids"], np.int32), np.asarray(row["rollout_logprobs"], np.float32)
        return cls(json.loads(row["messages"]), (), spans, [ids], [logprobs])

    @property
    def token_ids(self) -> np.ndarray:
        """[tokens] int32"""
        return np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """[tokens] float32, nats, 0 where not sampled"""
        return np.concatenate(self._logprobs) if self._logprobs else np.zeros(0, np.float32)

    @property
    def action_mask(self) -> np.ndarray:
        """[tokens] bool, true where sampled"""
        return np.repeat([s.is_generated for s in self.spans], [s.length for s in self.spans]).astype(bool)

    @property
    def turns(self) -> int:
        """Of the policy."""
        return sum(span.is_generated for span in self.spans)

    @property
    def last(self) -> int:
        """The last token's id."""
        return int(self._ids[-1][-1])

    def ids_of(self, span: Span) -> np.ndarray:
        return self.token_ids[span.start : span.start + span.length]

    def show(self, token_ids: Sequence[int] | np.ndarray, messages: Sequence[Message], role: str) -> None:
        """Tokens that the policy is to read, and the messages that they stand for."""
        self._append(Span(role, len(self), len(token_ids)), token_ids, np.zeros(len(token_ids), np.float32))
        self.messages.extend(messages)

    def say(self, completion: Completion, text: str) -> None:
        """A turn of the policy; text: its tokens decoded, for people and environments."""
        span = Span(
            "assistant",
            len(self),
            len(completion.token_ids),
            completion.finish_reason,
            completion.policy_version,
            completion.policy_digest,
        )
        self._append(span, completion.token_ids, completion.logprobs)
        self.messages.append({"role": "assistant", "content": text})

    def note(self, env_reward: float | None, tool_calls: tuple[ToolCall, ...]) -> None:
        """What came of the last turn."""
        self.spans[-1] = replace(self.spans[-1], env_reward=env_reward, tool_calls=tool_calls)

    def _append(self, span: Span, ids: Sequence[int] | np.ndarray, logprobs: np.ndarray) -> None:
        self.spans.append(span)
        self._ids.append(np.asarray(ids, np.int32))
        self._logprobs.append(np.asarray(logprobs, np.float32))


def _span(turn: Mapping[str, Any]) -> Span:
    names = ("role", "start", "length", "finish_reason", "policy_version", "policy_digest", "env_reward")
    calls = json.loads(turn["tool_calls"] or "[]")
    return Span(**{name: turn[name] for name in names}, tool_calls=tuple(ToolCall(**call) for call in calls))
