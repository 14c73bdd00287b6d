"""What an environment takes and gives. Light to import: a user's own environment needs nothing else from here."""

import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from pydantic import JsonValue

Message = Mapping[str, JsonValue]  # role, content, and what else the chat template reads
LARGEST = 3.4028234e38  # that a float32 can hold
ERROR_LIMIT = 4_000  # characters of an error that are on record


@dataclass(frozen=True)
class Episode:
    """One trajectory's task, as its environment is told it."""

    trajectory_id: str
    messages: tuple[Message, ...]  # the prompt's
    metadata: Mapping[str, JsonValue]  # the prompt's: reference answer, game, ...
    seed: int  # the trajectory's own, in [0, 2^63)


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy made, for the record."""

    name: str
    arguments: JsonValue


@dataclass(frozen=True)
class Reply:
    """What came of a turn.

    An environment that is broken raises: its trajectory is then failed, with a reward of NaN. What the policy did wrong
    is no exception but a message to it.
    """

    messages: tuple[Message, ...] = ()  # what the policy sees next, of roles that its chat template knows
    done: bool = False
    reward: float | None = None  # of this turn; None: none
    tool_calls: tuple[ToolCall, ...] = ()


class Environment:
    """The world of one trajectory: made for it, reset once, stepped once a turn, closed exactly once, whatever happens.

    Calls of one environment never overlap, but may come from different threads. Subclass it; only `step` must be there.
    """

    # Each lives in a process of its own, which is killed when a call takes too long. Without, it cannot be stopped.
    isolate = False
    # After `reset` it can go on at any turn: a trajectory that was cut off at a turn may be gone on with later.
    resumable = False

    @property
    def tools(self) -> Sequence[Mapping[str, JsonValue]]:
        """JSON schemas of the tools, for the chat template."""
        return ()

    def reset(self, episode: Episode) -> Sequence[Message]:
        """The conversation that the policy is to answer: the prompt's messages, unless the world says more."""
        return episode.messages

    def step(self, said: str) -> Reply:
        """said: the text of the policy's turn, without the token that ended it."""
        raise NotImplementedError(f"{type(self).__name__}.step(said) -> Reply is missing")

    def close(self) -> None:
        """Ends what the environment started."""


@dataclass(frozen=True)
class Opening:
    """What a reset gave."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]  # JSON schemas for the chat template


def opened(environment: Environment, episode: Episode) -> Opening:
    """Resets it. Raises TypeError unless it gives messages, and its tools are schemas."""
    name = type(environment).__name__
    messages = _messages(f"{name}.reset", environment.reset(episode))
    if not messages:
        raise TypeError(f"{name}.reset gave no message; the policy needs something to answer")
    return Opening(messages, tuple(_plain(f"{name}.tools has", tool) for tool in environment.tools))


def stepped(environment: Environment, said: str) -> Reply:
    """Steps it. Raises TypeError unless it gives a Reply from which a conversation can go on, or is done.

    The reply has plain values only, whatever the environment made it of.
    """
    call = f"{type(environment).__name__}.step"
    reply = environment.step(said)
    if not isinstance(reply, Reply):
        raise TypeError(f"{call} gave {_kind(reply)}; it must be a Reply")
    messages = _messages(call, reply.messages)
    if not reply.done and not messages:
        raise TypeError(f"{call} gave no message and is not done; the policy needs something to answer")
    return Reply(messages, bool(reply.done), _reward(call, reply.reward), _calls(call, reply.tool_calls))


def _messages(call: str, given: object) -> tuple[Message, ...]:
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{call} gave {_kind(given)} for messages; they must be a list of dicts with role and content")
    return tuple(_message(call, item) for item in given)


def _message(call: str, item: object) -> Message:
    if isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str):
        return _plain(f"{call} gave a message with", dict(item))
    shown = f"the message {_plain(f'{call} gave a message with', item)!r}" if isinstance(item, dict) else _kind(item)
    raise TypeError(f"{call} gave {shown}; a message must be a dict with role and content, both of them text")


def _reward(call: str, reward: object) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, Real):
        raise TypeError(f"{call} gave {_kind(reward)} for the reward; it must be a number, or None for no reward")
    if not abs(float(reward)) <= LARGEST:
        raise TypeError(f"{call} gave the reward {float(reward)}; it must be finite, or None for no reward")
    return float(reward)


def _calls(call: str, given: object) -> tuple[ToolCall, ...]:
    calls = tuple(given) if isinstance(given, Iterable) else (given,)
    for made in calls:
        if not isinstance(made, ToolCall) or not isinstance(made.name, str):
            raise TypeError(f"{call} gave {_kind(made)} for a tool call; it must be a ToolCall with a name")
    return tuple(ToolCall(*_plain(f"{call} gave a tool call with", [made.name, made.arguments])) for made in calls)


def _plain(told: str, value: object) -> Any:
    """As JSON has it, which is what can travel and be stored."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{told} what JSON cannot hold ({reason(error)}); give text, numbers, lists, dicts") from None
    return json.loads(text)


def _kind(value: object) -> str:
    """Of what type something is: never its repr, which may have an address in it and differ when it is made again."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


def reason(error: BaseException) -> str:
    """What a trajectory's record says of it."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.encode("utf-8", "replace").decode()[:ERROR_LIMIT]
