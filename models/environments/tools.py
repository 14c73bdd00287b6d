"""The environment whose policy may call tools: what a tool is, and how a turn that calls one is answered."""

import contextlib
import inspect
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json, to_jsonable_python

from models.environments.contract import Environment, Episode, Message, Reply, ToolCall
from models.environments.tool_calls import last_call
from models.tools.excerpt import excerpt

ERROR_LIMIT = 2_000  # characters of an error that the policy is told
RESULT_LIMIT = 100_000  # of any answer
EXACT = 2**53  # integral floats below are printed as integers
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Tool:
    """One tool, for the environments of many trajectories."""

    name: str
    schema: Mapping[str, JsonValue]  # {"type": "function", "function": {name, description, parameters}}
    stateful: bool  # each trajectory has an instance of its own
    make: Callable[[], Callable[..., object]]  # what is called; it may have a `close`, which is for stateful ones
    accept: Callable[[Any], dict[str, Any]]  # checks and converts arguments; raises ValidationError


def make_tool(tool: Any, options: Mapping[str, Any]) -> Tool:
    """A tool of a function or class with annotations and a docstring, which the model reads.

    A function is shared by all trajectories; of a class each has an instance, unless the class says `shared = True`:
    then one, made here, serves all, from many threads. A class may name its tool with `name`.
    options: a class's constructor gets them, a function with each call; the model does not see those.
    Raises ValueError for what cannot be called by name with JSON, or for options that do not fit.
    """
    if isinstance(tool, types.FunctionType):
        return _of_function(tool, options)
    call = inspect.getattr_static(tool, "__call__", None) if isinstance(tool, type) else None
    if isinstance(call, types.FunctionType):
        return _of_class(tool, call, options)
    raise ValueError(f"tool {tool!r}: it must be a function, or a class with __call__")


def keeps_state(tool: Any) -> bool:
    """Whether each trajectory has an instance of its own."""
    return isinstance(tool, type) and not getattr(tool, "shared", False)


def _of_function(function: types.FunctionType, options: Mapping[str, Any]) -> Tool:
    name = function.__name__
    accept = _accept(name, function, set(options))
    schema, shared = _schema(name, function.__doc__, accept), partial(function, **_fitting(name, function, options))
    return Tool(name, schema, False, lambda: shared, accept.validate_python)


def _of_class(cls: type, call: types.FunctionType, options: Mapping[str, Any]) -> Tool:
    name = getattr(cls, "name", cls.__name__)
    make = partial(cls, **_fitting(name, cls, options))
    receiver, *_ = inspect.signature(call).parameters
    accept = _accept(name, call, {receiver})
    schema = _schema(name, call.__doc__ or cls.__doc__, accept)
    if keeps_state(cls):
        return Tool(name, schema, True, make, accept.validate_python)
    instance = make()
    return Tool(name, schema, False, lambda: instance, accept.validate_python)


def _fitting(name: str, tool: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, as their annotations have them. What is missing of a function's the model gives."""
    signature = inspect.signature(tool, eval_str=True)
    try:
        (signature.bind if isinstance(tool, type) else signature.bind_partial)(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ValueError(f"environment.options.{name}: {error}; it takes {takes}") from None
    return {option: _converted(name, signature.parameters.get(option), option, options[option]) for option in options}


def _converted(name: str, parameter: inspect.Parameter | None, option: str, value: Any) -> Any:
    if parameter is None or parameter.annotation is parameter.empty:
        return value
    try:
        return TypeAdapter(parameter.annotation).validate_json(to_json(value), strict=True)
    except ValidationError as error:
        raise ValueError(f"environment.options.{name}.{option} = {value!r}: {error.errors()[0]['msg']}") from None


def _accept(name: str, function: types.FunctionType, hidden: set[str]) -> TypeAdapter[dict[str, Any]]:
    """What checks a function's arguments, without the hidden parameters. Annotations may be strings."""
    shown = [p for p in inspect.signature(function).parameters.values() if p.name not in hidden]
    for parameter in shown:
        if parameter.kind not in NAMED:
            raise ValueError(f"tool {name}: {parameter} cannot be passed by name; give each argument a name")
        if parameter.annotation is parameter.empty:
            raise ValueError(
                f"tool {name}: {parameter.name} has no annotation; the model is told it ({parameter.name}: str)"
            )

    def taken(**arguments: Any) -> dict[str, Any]:
        return arguments

    hints = inspect.get_annotations(function, eval_str=True)
    taken.__annotations__ = {p.name: hints[p.name] for p in shown}
    taken.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in shown])  # type: ignore[attr-defined]
    return TypeAdapter(taken)


def _schema(name: str, docstring: str | None, arguments: TypeAdapter[dict[str, Any]]) -> dict[str, JsonValue]:
    if not docstring:
        raise ValueError(f"tool {name}: it has no docstring; that is what the model reads of it")
    parameters = arguments.json_schema()
    for parameter in parameters["properties"].values():
        parameter.pop("title", None)
    function = {"name": name, "description": inspect.cleandoc(docstring), "parameters": parameters}
    return {"type": "function", "function": function}


class ToolEnvironment(Environment):
    """Answers each turn with what the tool says that it calls last; a turn that calls none is the final answer.

    The policy's mistakes, and errors that a tool raises, are messages to it.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Raises ValueError without tools, or if two have one name."""
        names = [tool.name for tool in tools]
        twice = [name for name in names if names.count(name) > 1]
        if twice or not names:
            raise ValueError(f"environment.tools: {twice[0]} is there twice" if twice else "environment.tools is empty")
        self._tools = {tool.name: tool for tool in tools}
        self._callables: dict[str, Callable[..., object]] = {}
        self._open = contextlib.ExitStack()

    @property
    def tools(self) -> Sequence[Mapping[str, JsonValue]]:
        return tuple(tool.schema for tool in self._tools.values())

    def reset(self, episode: Episode) -> Sequence[Message]:
        """The prompt. Makes the trajectory's own tools: one that cannot be made fails the trajectory."""
        for name, tool in self._tools.items():
            made = self._callables[name] = tool.make()
            if tool.stateful and hasattr(made, "close"):
                self._open.callback(made.close)
        return episode.messages

    def step(self, said: str) -> Reply:
        call = last_call(said)
        if call is None:
            return Reply(done=True)
        content = excerpt(self._answer(call), RESULT_LIMIT)
        return Reply(({"role": "tool", "name": call.name, "content": content},), tool_calls=(call,))

    def close(self) -> None:
        """Closes each of the trajectory's own tools, once, whatever another one raises; the last error is raised."""
        self._open.close()

    def _answer(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            return excerpt(f"Error: there is no tool {call.name!r}; there are {', '.join(self._tools)}", ERROR_LIMIT)
        if not isinstance(call.arguments, dict):
            return f"Error: the arguments of {tool.name} must be a JSON object"
        try:
            return _text(self._callables[tool.name](**tool.accept(call.arguments)))
        except ValidationError as error:
            return excerpt(f"Error: {_mistakes(error)}", ERROR_LIMIT)
        except (Exception, SystemExit) as error:  # whatever it is, the policy has to live with it
            return excerpt(f"Error: {_written(f'{type(error).__name__}: {error}')}", ERROR_LIMIT)


def _mistakes(error: ValidationError) -> str:
    """What is wrong with the arguments, in a line."""
    return _written("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()))


def _text(value: object) -> str:
    if isinstance(value, str):
        return _written(value)
    return _written(json.dumps(_plain(to_jsonable_python(value)), ensure_ascii=False))


def _plain(value: JsonValue) -> JsonValue:
    match value:
        case float() if math.isfinite(value) and value.is_integer() and abs(value) < EXACT:
            return int(value)
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case _:
            return value


def _written(text: str) -> str:
    """The text without halves of surrogate pairs, which no table can hold."""
    return text.encode("utf-8", "replace").decode()
