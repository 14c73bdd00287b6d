"""`rollbook show` of whole trajectories, and `rollbook report`, on a finished real run."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

from data.ledger import Ledger
from data.store import Store
from data.summary import summarize
from flows import trajectory_views
from flows.reading import Choice, chosen
from flows.trajectory_views import By, painter, tinted
from tests.flows.test_records import Tool, tool_at
from tests.reports import record_example


@pytest.fixture
def tool(finished: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> Tool:
    return tool_at(finished[0].folder / ".rollbook", monkeypatch)


def test_worst_best_and_group(finished: tuple[Any, str], tool: Tool) -> None:
    listed = tool("show", "small", "--iteration", "1", "--json")["trajectories"]
    rewards = sorted(t["reward"] for t in listed)
    worst = tool("show", "small", "--iteration", "1", "--worst", "3", "--json")
    best = tool("show", "small", "--iteration", "1", "--best", "2", "--json")
    assert [t["reward"] for t in worst["trajectories"]] == rewards[:3] and worst["iteration"] == 1
    assert [t["reward"] for t in best["trajectories"]] == rewards[::-1][:2]
    assert tool("show", "small", "--best", "1", "--json")["iteration"] == 2  # the last
    one = worst["trajectories"][0]
    (again,) = tool("show", "small", "--iteration", "1", "--group", one["trajectory_id"], "--json")["trajectories"]
    assert again == one == tool("show", "small", "--trajectory", one["trajectory_id"], "--json")
    assert "".join(one["token_texts"]) == "".join(turn["text"] for turn in one["turns"])
    assert tool("show", "small", "--failed", "--json")["trajectories"] == []
    assert "none" in tool("show", "small", "--failed")
    assert "--worst and --failed: choose one of them" in tool("show", "small", "--worst", "1", "--failed", code=1)
    assert "group 'nowhere': not in this iteration" in tool("show", "small", "--group", "nowhere", code=1)


def test_report_as_a_file(tool: Tool, tmp_path: Path) -> None:
    assert "iteration 1 of small" in tool("report", "small", str(tmp_path / "r.html"), "--iteration", "1")
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>") and '"run":"small","iteration":1,' in page
    assert "not on record" in tool("report", "small", str(tmp_path / "s.html"), "--iteration", "9", code=1)
    assert not (tmp_path / "s.html").exists()


@pytest.fixture
def example(tmp_path: Path) -> Any:
    """The worked example; what B/0 says last would move a terminal's cursor."""
    ledger = Ledger(Store(str(tmp_path / "store")), "sort")
    record_example(ledger, tmp_path, {"B/0": "\x1b[2J[red]\u202e"})
    return chosen(summarize(ledger), ledger, Choice(group="B/1"), None)


def printed(found: Any, by: By, **how: Any) -> str:
    out = StringIO()
    trajectory_views.chosen(Console(file=out, width=100, **how), found, by)
    return out.getvalue()


def test_every_turn_is_shown_and_nothing_of_it_is_obeyed(example: Any) -> None:
    text = printed(example, By.VALUE)
    assert text.count("user, ") == 3 and text.count("assistant, ") == 3  # B/0 has four turns, B/1 two
    assert "\\x1b[2J[red]\\u202e" in text and "\x1b" not in text
    assert "2 trajectories, tokens by value" in text and "no colours here" in text
    assert "error: timeout after 10 s" in text and "match 0.500" in text


def test_colours_of_tokens(example: Any) -> None:
    """Full at the largest of both, .7825; half of it is .39; of the mask what is in the loss is blue, B/1 is not."""
    rows = example["trajectories"]
    paint = painter(rows, By.ADVANTAGE)
    assert [paint(rows[0], i) == Style() for i in (2, 8)] == [False, False] and paint(rows[1], 2) == Style()
    assert paint(rows[0], 2) == tinted(1.0) and paint(rows[0], 9) == tinted(0.4 / 0.7825)
    mask = painter(rows, By.MASK)
    assert mask(rows[0], 2) == tinted(1.0) and mask(rows[1], 2) == tinted(-1.0)
    assert painter(rows, By.GAP)(rows[0], 2) == tinted(1.0)  # all are .25
    assert painter(rows, By.LOGPROB)(rows[0], 2) == tinted(-1.0)  # all are -.5
    # 255 + .85 (c - 255) of the blue 60 130 246
    assert tinted(1.0).bgcolor.triplet == (89, 149, 247) and tinted(0.01) == Style() and tinted(float("nan")) == Style()


def test_a_gap_of_two_distributions_is_not_shown(example: Any) -> None:
    """The log-probs are there and differ, but one is of a distribution that top-p had cut."""
    rows = [{**row, "gap_refused": "top_p 0.8"} for row in example["trajectories"]]
    assert painter(rows, By.GAP)(rows[0], 2) == Style()
    assert "no gap between engine and trainer: top_p 0.8" in printed({**example, "trajectories": rows}, By.GAP)


def test_a_strip_has_the_colours_where_its_tokens_add_up(example: Any) -> None:
    """What B/1 says is not what its tokens spell: no colour; made to fit, each token has its own."""
    row = example["trajectories"][1]
    turn = {**row["turns"][1], "text": "ab"}
    fitting = {**row, "token_texts": ["x", "y", "a", "b"]}
    text = trajectory_views._coloured(fitting, turn, painter([row], By.LOGPROB))
    assert isinstance(text, Text) and [(s.start, s.end) for s in text.spans] == [(0, 1), (1, 2)]
    assert not trajectory_views._coloured(row, row["turns"][1], painter([row], By.LOGPROB)).spans


def test_no_color_is_respected(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = {**example, "trajectories": [{**t, "turns": _spelled(t)} for t in example["trajectories"]]}
    coloured = printed(fitting, By.LOGPROB, force_terminal=True, color_system="truecolor")
    assert "\x1b[30;48;2;" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;2;" not in printed(fitting, By.LOGPROB, force_terminal=True)


def _spelled(row: Any) -> list[Any]:
    ends = [(t, t["start"], t["start"] + t["length"]) for t in row["turns"]]
    return [{**t, "text": "".join(x or "" for x in row["token_texts"][a:b])} for t, a, b in ends]
