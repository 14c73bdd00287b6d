"""The call of a tool in what the policy said: the last `<tool_call>{...}</tool_call>`."""

import json
import math

from pydantic import JsonValue

from models.environments.contract import ToolCall

OPENING = "<tool_call>"


def last_call(said: str) -> ToolCall | None:
    """The last call; None without one, or if what follows the last opening tag is none.

    The closing tag may be missing (a stop string ate it), and a tag inside a JSON string is no tag. Both
    {"name", "arguments"} and {"function": {"name", "arguments"}} will do, the arguments an object or a string of one.
    """
    found, at = None, said.find(OPENING)
    while at >= 0:
        start = at + len(OPENING)
        start += len(said[start:]) - len(said[start:].lstrip())
        found, end = _value(said, start)
        at = said.find(OPENING, end)
    return _call(found)


def _value(text: str, start: int) -> tuple[JsonValue, int]:
    """The JSON value there, and where it ends; (None, start) where there is none that can be recorded."""
    try:
        value, end = DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # not half a surrogate pair, which no table can hold
    except (ValueError, RecursionError):
        return None, start
    return value, end


def _call(value: JsonValue) -> ToolCall | None:
    match value:
        case {"function": {"name": str(name), **rest}} | {"name": str(name), **rest}:
            return ToolCall(name, _decoded(rest.get("arguments", {})))
        case _:
            return None


def _decoded(arguments: JsonValue) -> JsonValue:
    if not isinstance(arguments, str):
        return arguments
    value, end = _value(arguments, len(arguments) - len(arguments.lstrip()))
    return arguments if arguments[end:].strip() else value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no JSON number")
    return number


# Not strict: models write line feeds into strings as they are.
DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite, strict=False)
