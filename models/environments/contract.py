"""What an environment takes and gives. Light to import: a user's own environment needs nothing else from here."""

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
