"""Turns that call tools: what is taken for a call, and what the policy reads of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from data.user_code import load
from models.environments.contract import Environment, Episode, ToolCall
from models.environments.spec import EnvironmentSpec
from models.environments.tool_calls import last_call
from models.environments.tools import ToolEnvironment, make_tool
from models.tools.sandbox import Python
from models.tools.search import Search
from models.tools.visit import Visit

EPISODE = Episode("t", ({"role": "user", "content": "Go"},), {}, 0)


def add(a: int, b: int = 1) -> int:
    """Add two integers."""
    return a + b


def say(value: Any) -> Any:
    """Say it."""
    return value


def fail(how: Literal["raise", "exit", "long"]) -> None:
    """Fail."""
    if how == "exit":
        raise SystemExit(2)
    raise KeyError("lost" if how == "raise" else "x" * 10_000)


class Counter:
    """Counts its calls."""

    opened: list["Counter"] = []  # noqa: RUF012

    def __init__(self, start: int = 0) -> None:
        self.count, self.closed = start, 0
        self.opened.append(self)

    def __call__(self) -> int:
        self.count += 1
        return self.count

    def close(self) -> None:
        self.closed += 1


class Shared(Counter):
    """Counts all calls."""

    shared = True
    name = "all_calls"


class Stubborn(Counter):
    """Does not close."""

    def close(self) -> None:
        super().close()
        raise RuntimeError("stuck")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "opened", [])


def environment(*tools: Any, options: Mapping[str, Any] | None = None) -> ToolEnvironment:
    made = ToolEnvironment([make_tool(tool, options or {}) for tool in tools])
    made.reset(EPISODE)
    return made


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer(of: Environment, said: str) -> Any:
    return of.step(said).messages[0]["content"]


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', {"a": 1}),
        ('Well.\n<tool_call>\n {"name": "f", "arguments": {"a": 1}}\n</tool_call>\nDone', {"a": 1}),
        ('<tool_call>{"name": "f", "arguments": {"a": {"b": "}"}}}', {"a": {"b": "}"}}),  # the tag was eaten
        ('<tool_call>{"name": "f", "arguments": {"a": "\\"}"}} and so on', {"a": '"}'}),
        ('<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', {"a": 1}),
        ('<tool_call>{"id": "7", "type": "function", "function": {"name": "f", "arguments": "{}"}}</tool_call>', {}),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "arguments": "a = 1"}</tool_call>', "a = 1"),
        ('<tool_call>{"name": "f"}</tool_call>', {}),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', {"a": "x\ny"}),
        ('<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>', {"a": 2}),
        ('<tool_call>no<tool_call>{"name": "f", "arguments": {"a": 3}}', {"a": 3}),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}',
            {"a": "<tool_call>{}</tool_call>"},
        ),
    ],
)
def test_last_call(said: str, arguments: object) -> None:
    assert last_call(said) == ToolCall("f", arguments)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "The answer is 4.",
        '{"name": "f", "arguments": {}}',
        "<tool_call>",
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"',  # the last one counts
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 5_000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000,
    ],
)
def test_no_call_is_the_final_answer(said: str) -> None:
    """Among them what no table can hold: numbers that are none, half a surrogate pair, nesting without end."""
    reply = environment(add).step(said)
    assert (reply.done, reply.messages, reply.tool_calls) == (True, (), ())


def test_answers_and_records_the_call() -> None:
    reply = environment(add).step(f"Let me add. {call('add', a=2, b=3)}")
    assert not reply.done
    assert reply.messages == ({"role": "tool", "name": "add", "content": "5"},)
    assert reply.tool_calls == (ToolCall("add", {"a": 2, "b": 3}),)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (4.0, "4"),
        (2.5, "2.5"),
        ([1.0, {"a": 2.0}], '[1, {"a": 2}]'),
        (None, "null"),
        (True, "true"),
        ("ü", "ü"),
        (["ü"], '["ü"]'),
        (1e300, "1e+300"),
        (float("nan"), "NaN"),
        ((1, 2), "[1, 2]"),
        ("\ud800", "?"),
    ],
)
def test_what_a_tool_returns(value: object, text: str) -> None:
    made = environment(add)
    made._callables["add"] = lambda **_: value
    assert answer(made, call("add", a=1)) == text


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (call("sub", a=1), "Error: there is no tool 'sub'; there are add, fail"),
        (call("add"), "Error: a: Missing required keyword only argument"),
        (call("add", a="x"), "Error: a: Input should be a valid integer, unable to parse string as an integer"),
        (call("add", a=1, c=2), "Error: c: Unexpected keyword argument"),
        ('<tool_call>{"name": "add", "arguments": [1]}', "Error: the arguments of add must be a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "1, 2"}', "Error: the arguments of add must be a JSON object"),
        (call("fail", how="raise"), "Error: KeyError: 'lost'"),
        (call("fail", how="exit"), "Error: SystemExit: 2"),
    ],
)
def test_errors_are_told_to_the_policy(said: str, text: str) -> None:
    reply = environment(add, fail).step(said)
    assert reply.messages[0]["content"] == text
    assert not reply.done
    assert len(reply.tool_calls) == 1


def test_long_errors_and_results_are_cut() -> None:
    """2,000 of "Error: KeyError: '" and 10,000 x and a quote, 10,019 in all; 100,000 of 300,000."""
    assert "[8019 characters left out]" in answer(environment(fail), call("fail", how="long"))
    assert "[200000 characters left out]" in answer(environment(say), call("say", value="x" * 300_000))


def test_arguments_are_converted() -> None:
    assert answer(environment(add), call("add", a="2")) == "3"


def test_schema() -> None:
    assert make_tool(add, {}).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def test_options_of_a_function_are_not_shown() -> None:
    tool = make_tool(add, {"b": 40})
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["a"]  # type: ignore[index,call-overload]
    made = environment(add, options={"b": 40})
    assert answer(made, call("add", a=2)) == "42"
    assert answer(made, call("add", a=2, b=1)) == "Error: b: Unexpected keyword argument"


def test_each_trajectory_has_its_own_instance() -> None:
    tool = make_tool(Counter, {"start": 10})
    first, second = ToolEnvironment([tool]), ToolEnvironment([tool])
    for each in (first, second):
        each.reset(EPISODE)
    assert [answer(first, call("Counter")), answer(first, call("Counter")), answer(second, call("Counter"))] == [
        "11",
        "12",
        "11",
    ]


def test_options_are_converted_by_annotations_and_left_alone_without() -> None:
    class Told:
        """Says its options."""

        def __init__(self, path: Path, pair: tuple[int, int], odd=0, **more) -> None:  # type: ignore[no-untyped-def]
            self.told = (path, pair, odd, more)

        def __call__(self) -> str:
            return str(self.told)

    made = make_tool(Told, {"path": "a", "pair": [1, 2], "odd": "x", "even": [3]}).make()
    assert made.told == (Path("a"), (1, 2), "x", {"even": [3]})  # type: ignore[attr-defined]


def test_a_shared_instance_serves_all_and_stays_open() -> None:
    tool = make_tool(Shared, {})
    for expected in ("1", "2"):
        made = ToolEnvironment([tool])
        made.reset(EPISODE)
        assert answer(made, call("all_calls")) == expected
        made.close()
    assert [each.closed for each in Counter.opened] == [0]


def test_closes_once_and_all() -> None:
    made = environment(Counter, Stubborn)
    with pytest.raises(RuntimeError, match="stuck"):
        made.close()
    made.close()
    assert [each.closed for each in Counter.opened] == [1, 1]


def test_closes_what_was_made_when_another_cannot_be() -> None:
    class Broken(Counter):
        """Cannot be made."""

        def __init__(self) -> None:
            raise OSError("no room")

    made = ToolEnvironment([make_tool(Counter, {}), make_tool(Broken, {})])
    with pytest.raises(OSError, match="no room"):
        made.reset(EPISODE)
    made.close()
    assert [each.closed for each in Counter.opened] == [1]


def test_resumable_without_state_only() -> None:
    assert EnvironmentSpec("tools", ("calculator", "visit")).resumable
    assert not EnvironmentSpec("tools", ("calculator", "python")).resumable


def test_refuses_no_tool_and_two_of_one_name() -> None:
    with pytest.raises(ValueError, match="empty"):
        ToolEnvironment([])
    with pytest.raises(ValueError, match="add is there twice"):
        environment(add, say, add)


def without_docstring(a: int) -> int:
    return a


def without_annotation(a) -> int:  # type: ignore[no-untyped-def]
    """a"""
    return a


def of_any_number(*a: int) -> int:
    """a"""
    return len(a)


@pytest.mark.parametrize(
    ("tool", "options", "why"),
    [
        (without_docstring, {}, "no docstring"),
        (without_annotation, {}, "a has no annotation"),
        (of_any_number, {}, "cannot be passed by name"),
        (object, {}, "a class with __call__"),
        (3, {}, "must be a function"),
        (add, {"c": 1}, r"^environment\.options\.add: got an unexpected keyword argument 'c'; it takes a, b$"),
        (Counter, {"stop": 1}, "got an unexpected keyword argument 'stop'; it takes start$"),
        (
            Counter,
            {"start": "lots"},
            r"^environment\.options\.Counter\.start = 'lots': Input should be a valid integer$",
        ),
        (Counter, {"start": True}, "start = True: Input should be a valid integer"),
        (add, {"b": "x"}, "options.add.b = 'x': Input should be a valid integer"),
        (Python, {"memory_mb": "lots"}, "options.python.memory_mb = 'lots'"),
        (Python, {"disk_mb": 0}, "disk_mb = 0: Input should be greater than 0"),
        (Python, {"isolated": "no"}, "isolated = 'no': Input should be a valid boolean"),
        (Search, {}, "missing a required argument: 'backend'; it takes backend, index, results"),
        (Search, {"backend": "bm25", "indx": "a"}, "unexpected keyword argument 'indx'"),
        (Search, {"backend": "bm25", "index": "a", "results": 0}, "results = 0: Input should be greater than 0"),
        (Visit, {"timeout_s": 0}, "timeout_s = 0: Input should be greater than 0"),
    ],
)
def test_refuses_what_cannot_be_a_tool(tool: object, options: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_tool(tool, options)


def test_tools_of_a_users_file(tmp_path: Path) -> None:
    """Its annotations are strings, and it imports nothing from here."""
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "def lookup(word: str, table: dict[str, int]) -> int:\n"
        "    '''Look a word up.'''\n"
        "    return table[word]\n"
    )
    spec = EnvironmentSpec(
        "tools", ("calculator", load(f"{tmp_path / 'mine.py'}:lookup")), {"lookup": {"table": {"one": 1}}}
    )
    made = spec.make()
    assert list(made.reset(EPISODE)) == list(EPISODE.messages)
    assert [tool["function"]["name"] for tool in made.tools] == ["calculator", "lookup"]  # type: ignore[index,call-overload]
    assert answer(made, call("lookup", word="one")) == "1"
    assert answer(made, call("lookup", word="two")) == "Error: KeyError: 'two'"
    assert answer(made, call("calculator", expression="6 / 2")) == "3"
    assert answer(made, call("calculator", expression="1 / 0")) == "Error: ValueError: '1 / 0': division by zero"
