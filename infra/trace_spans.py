"""A trajectory's turns and tool calls as the spans of an MLflow trace, with chat messages as inputs and outputs."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow.entities import Span, SpanStatusCode, SpanType
from mlflow.tracing.constant import SpanAttributeKey

from data.conversations import Trajectory, Turn

OPENAI = {SpanAttributeKey.MESSAGE_FORMAT: "openai"}
type Message = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """What a span is before it has its place in a trace: a turn's, or a call's of a tool."""

    name: str
    kind: str  # SpanType
    turn: Turn
    inputs: Any
    outputs: Any
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Clock:
    """From token to time. The engine's clock is of a whole call, so a turn gets its tokens' share of it."""

    start_ns: int
    duration_ns: int
    tokens: int

    def at(self, token: int) -> int:
        return self.start_ns + self.duration_ns * token // max(self.tokens, 1)


def spans(trace_id: str, trajectory: Trajectory, clock: Clock) -> list[Span]:
    """The root, which is the whole conversation, and below it the turns in order; the same ids whenever asked."""
    said = messages_by_turn(trajectory.messages, trajectory.turns)
    root = _span_id(trace_id, 0)
    made = [_root(trace_id, trajectory, said, clock)]
    for number, part in enumerate(_parts(trajectory.turns, said), 1):
        times = clock.at(part.turn.start), clock.at(part.turn.start + part.turn.length)
        attributes = {SpanAttributeKey.INPUTS: part.inputs, SpanAttributeKey.OUTPUTS: part.outputs} | part.attributes
        attributes |= {SpanAttributeKey.SPAN_TYPE: part.kind, "rollbook.tokens": part.turn.length}
        made.append(_span(trace_id, number, root, part.name, times, attributes, part.error))
    return made


def messages_by_turn(messages: Sequence[Message], turns: Sequence[Turn]) -> list[list[Message]]:
    """Each turn's messages: of a generated one the assistant's, of another all up to the next generated one.

    The last assistant messages are the generated ones: a prompt may bring some of its own. If there are fewer of them
    than generated turns, each turn is one message with its decoded text.
    """
    written = sum(turn.is_generated for turn in turns)
    spoken = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if written > len(spoken):
        return [[{"role": turn.role, "content": turn.text}] for turn in turns]
    places, found, next_message = iter(spoken[len(spoken) - written :]), [], 0
    own = [next(places) if turn.is_generated else None for turn in turns]
    for i, place in enumerate(own):
        end = place + 1 if place is not None else next((p for p in own[i:] if p is not None), len(messages))
        found.append(list(messages[next_message if place is None else place : end]))
        next_message = end
    return found


def prompt_and_answer(trajectory: Trajectory) -> tuple[list[Message], Message | None]:
    """What was asked, and the last thing that the policy said to it, if it said anything."""
    said = messages_by_turn(trajectory.messages, trajectory.turns)
    return _prompt(trajectory.turns, said), _answer(trajectory.turns, said)


def trace_name(trajectory: Trajectory) -> str:
    """One for all trajectories of a purpose, so that MLflow's pages count them together."""
    return "trajectory" if trajectory.purpose == "train" else f"{trajectory.purpose} trajectory"


def _prompt(turns: Sequence[Turn], said: Sequence[list[Message]]) -> list[Message]:
    first = next((i for i, turn in enumerate(turns) if turn.is_generated), len(turns))
    return [message for messages in said[:first] for message in messages]


def _answer(turns: Sequence[Turn], said: Sequence[list[Message]]) -> Message | None:
    written = [messages[-1] for turn, messages in zip(turns, said, strict=True) if turn.is_generated]
    return written[-1] if written else None


def _root(trace_id: str, trajectory: Trajectory, said: Sequence[list[Message]], clock: Clock) -> Span:
    answer = _answer(trajectory.turns, said)
    written = sum(turn.length for turn in trajectory.turns if turn.is_generated)
    attributes = {
        SpanAttributeKey.INPUTS: {"messages": _prompt(trajectory.turns, said)},
        SpanAttributeKey.OUTPUTS: None if answer is None else _choice(answer, None),
        SpanAttributeKey.SPAN_TYPE: SpanType.AGENT,
        SpanAttributeKey.CHAT_USAGE: _usage(clock.tokens - written, written),
        "rollbook.trajectory_id": trajectory.trajectory_id,
        "rollbook.metadata": trajectory.metadata,
        **OPENAI,
    }
    name = trace_name(trajectory)
    return _span(trace_id, 0, None, name, (clock.at(0), clock.at(clock.tokens)), attributes, trajectory.failure)


def _parts(turns: Sequence[Turn], said: Sequence[list[Message]]) -> Iterator[Part]:
    before: list[Message] = []
    calls: list[Any] = []
    for turn, messages in zip(turns, said, strict=True):
        if turn.is_generated:
            calls = _listed(turn.tool_calls)
            yield _generated(turn, before, messages[-1])
        elif turn.role == "tool":
            yield from _called(turn, _listed(turn.tool_calls) or calls, messages)
        else:
            yield Part(turn.role, SpanType.CHAIN, turn, None, {"messages": messages})
        before = [*before, *messages]


def _generated(turn: Turn, before: list[Message], message: Message) -> Part:
    attributes = {
        SpanAttributeKey.CHAT_USAGE: _usage(turn.start, turn.length),
        "rollbook.finish_reason": turn.finish_reason,
        "rollbook.policy_version": turn.policy_version,
        "rollbook.policy_digest": turn.policy_digest,
        "rollbook.env_reward": turn.env_reward,
        **OPENAI,
    }
    known = {name: value for name, value in attributes.items() if value is not None}
    outputs = _choice(message, turn.finish_reason)
    return Part("assistant", SpanType.CHAT_MODEL, turn, {"messages": before}, outputs, known)


def _called(turn: Turn, calls: Sequence[Any], messages: Sequence[Message]) -> Iterator[Part]:
    """One part a call, with the tool message that answers it: by its id, else by its place."""
    answers = [message for message in messages if message.get("role") == "tool"]
    by_id = {message["tool_call_id"]: message for message in answers if "tool_call_id" in message}
    for i in range(max(len(calls), len(answers), 1)):
        call = calls[i] if i < len(calls) and isinstance(calls[i], dict) else {}
        function = call["function"] if isinstance(call.get("function"), dict) else call
        answer = by_id.get(call.get("id"), answers[i] if i < len(answers) else {})
        outputs = answer.get("content", call.get("result"))
        name, error = str(function.get("name") or answer.get("name") or "tool"), call.get("error")
        inputs = _parsed(function.get("arguments"))
        yield Part(name, SpanType.TOOL, turn, inputs, outputs, error=None if error is None else str(error))


def _listed(calls: str | None) -> list[Any]:
    found = _parsed(calls)
    return found if isinstance(found, list) else [] if found is None else [found]


def _parsed(text: Any) -> Any:
    """A model may have written what is no JSON: that is shown as it is."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _choice(message: Message, finish_reason: str | None) -> dict[str, Any]:
    ending = {} if finish_reason is None else {"finish_reason": finish_reason}
    return {"choices": [{"index": 0, "message": message, **ending}]}


def _usage(read: int, written: int) -> dict[str, int]:
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}


def _span_id(trace_id: str, number: int) -> str:
    return hashlib.sha256(f"{trace_id}/{number}".encode()).hexdigest()[:16]


def _span(
    trace_id: str,
    number: int,
    parent: str | None,
    name: str,
    times: tuple[int, int],
    attributes: Mapping[str, Any],
    error: str | None,
) -> Span:
    code = SpanStatusCode.OK if error is None else SpanStatusCode.ERROR
    written = attributes | {SpanAttributeKey.REQUEST_ID: trace_id}
    return Span.from_dict(
        {
            "trace_id": trace_id,
            "span_id": _span_id(trace_id, number),
            "parent_span_id": parent,
            "name": sound(name),
            "start_time_unix_nano": times[0],
            "end_time_unix_nano": times[1],
            "status": {"code": code.value, "message": sound(error or "")},
            "attributes": {key: _json(value) for key, value in written.items() if value is not None},
            "events": [],
        }
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


def sound(text: str) -> str:
    """Text that any database takes: PostgreSQL has no NUL, and nothing encodes half of a surrogate pair."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
