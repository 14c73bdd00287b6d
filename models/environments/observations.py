"""What a world shows, as messages of a conversation."""

from collections.abc import Sequence

from models.environments.contract import Message


def observation(text: str) -> Message:
    return {"role": "user", "content": text}


def with_opening(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """The prompt with the first observation: within its last turn if that is the user's, else as a turn of its own.

    Two user turns in a row are refused by many chat templates.
    """
    if not text:
        return tuple(messages)
    if not messages or messages[-1]["role"] != "user":
        return (*messages, observation(text))
    last = messages[-1]
    return (*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"})
