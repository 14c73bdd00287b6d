"""What an environment takes and gives. Light to import: a user's own environment needs nothing else from here."""

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

Message = Mapping[str, JsonValue]  # role, content, and what else the chat template reads


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
    """Resets it. Raises TypeError unless it gives messages."""
    messages = tuple(_message(environment, "reset", item) for item in environment.reset(episode))
    if not messages:
        raise TypeError(f"{type(environment).__name__}.reset gave no message; the policy needs something to answer")
    return Opening(messages, tuple(environment.tools))


def stepped(environment: Environment, said: str) -> Reply:
    """Steps it. Raises TypeError unless it gives a Reply from which a conversation can go on, or is done."""
    reply, name = environment.step(said), type(environment).__name__
    if not isinstance(reply, Reply):
        raise TypeError(f"{name}.step gave {reply!r}; it must be a Reply")
    for item in reply.messages:
        _message(environment, "step", item)
    if not reply.done and not reply.messages:
        raise TypeError(f"{name}.step gave no message and is not done; the policy needs something to answer")
    if reply.reward is not None and not math.isfinite(reply.reward):
        raise TypeError(f"{name}.step gave the reward {reply.reward}; it must be finite, or None for no reward")
    return reply


def _message(environment: Environment, call: str, item: object) -> Message:
    if isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str):
        return dict(item)
    raise TypeError(
        f"{type(environment).__name__}.{call} gave the message {item!r}; it must be a dict with role and content"
    )


def reason(error: BaseException) -> str:
    """What a trajectory's record says of it."""
    return "".join(traceback.format_exception_only(error)).strip()
