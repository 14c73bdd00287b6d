"""`report.html`: what it may hold, and what a browser makes of it."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from data.ledger import Ledger
from data.report import report
from data.store import Store
from infra.report.page import FOLDER, page
from tests.browser import Seen, chromium
from tests.reports import record_example

HOSTILE = {
    "A/0": "</script><script>alert(1)</script><!--<script>",
    "A/1": "<img src=x onerror=alert(2)><iframe srcdoc='<script>alert(3)</script>'><b>bold</b> &lt;i&gt;",
    "B/0": "[x](javascript:alert(4)) <a href='javascript:alert(5)'>y</a> \u202eevil\u202c \x00 \x1b[31m \u2028\u2029",
    "B/1": "w" * 100_000,
}


def written(folder: Path) -> dict[str, Any]:
    (folder / "tokenizer").mkdir()
    ledger = Ledger(Store(str(folder / "store")), "sort")
    return report(ledger, record_example(ledger, folder / "tokenizer", HOSTILE))


class Elements(HTMLParser):
    """Tags in order, and the text that each begins with: of a script or a style all."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append("")
        self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inside[-1] += data


def test_the_data_is_one_element_and_comes_back_as_it_was(tmp_path: Path) -> None:
    found = written(tmp_path)
    found["run"] = "lone \ud800 surrogate"
    elements = Elements()
    elements.feed(page(found).decode())
    scripts = [(a, text) for (tag, a), text in zip(elements.tags, elements.inside, strict=True) if tag == "script"]
    assert [attributes for attributes, _ in scripts] == [{"type": "application/json", "id": "data"}, {}, {}, {}]
    assert json.loads(scripts[0][1]) == json.loads(json.dumps(found))
    assert not re.search("[<>&\u2028\u2029]", scripts[0][1])


def test_the_policy_allows_just_what_is_there(tmp_path: Path) -> None:
    elements = Elements()
    elements.feed(page(written(tmp_path)).decode())
    meta = next(a for tag, a in elements.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    rules = {rule.split()[0]: rule.split()[1:] for rule in str(meta["content"]).split("; ")}
    assert rules.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    for kind, rule in (("script", "script-src"), ("style", "style-src")):
        texts = [t for (tag, a), t in zip(elements.tags, elements.inside, strict=True) if tag == kind and "id" not in a]
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[rule] == [f"'sha256-{digest}'" for digest in digests]


def test_libraries_are_what_their_readme_says() -> None:
    rows = re.findall(r"^\| (\S+) \| .* \| `([0-9a-f]{64})` \|$", (FOLDER / "vendor/README.md").read_text(), re.M)
    assert {name for name, _ in rows} == {file.name for file in (FOLDER / "vendor").glob("*.min.*")}
    for name, digest in rows:
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Any, Seen]]:
    (tmp_path / "report.html").write_bytes(page(written(tmp_path)))
    with chromium() as (tab, seen):
        tab.goto(f"file://{tmp_path}/report.html")
        tab.wait_for_selector(".tabulator-row.chosen")
        yield tab, seen


def rows(tab: Any) -> list[str]:
    return tab.locator(".tabulator-row .tabulator-cell:first-child").all_inner_texts()


@pytest.mark.slow
def test_nothing_that_a_model_wrote_runs_or_is_fetched(opened: tuple[Any, Seen]) -> None:
    tab, seen = opened
    for name, text in HOSTILE.items():
        tab.locator(".tabulator-row", has_text=name).click()
        for key in "123456":
            tab.keyboard.press(key)
        tab.keyboard.press("1")
        shown = tab.locator("#one").text_content()
        expected = re.sub("[\x00\x1b\u2028\u2029\u202c\u202e]", lambda m: f"\\u{ord(m[0]):04x}", text)
        assert expected in shown, name
    tags = set(tab.evaluate("[...document.querySelectorAll('main *')].map(e => e.localName)"))
    assert not tags & {"script", "img", "iframe", "a", "b:not(h3 b)", "i"}
    time.sleep(0.3)
    assert seen.dialogs == [] and seen.complaints == [] and len(seen.requests) == 1


@pytest.mark.slow
def test_the_table_is_filtered_and_sorted(opened: tuple[Any, Seen]) -> None:
    """The worst first; what has no reward last."""
    tab, seen = opened
    assert rows(tab) == ["A/1", "A/0", "B/0", "B/1"]
    tab.select_option("#status", "truncated")
    assert rows(tab) == ["A/1"] and tab.inner_text("#count") == "1 of 4"
    tab.keyboard.press("Escape")
    tab.fill("#reward-from", "0.5")
    assert rows(tab) == ["A/0", "B/0"]
    tab.click("#clear")
    tab.fill("#length-to", "2")
    assert rows(tab) == ["A/1", "B/1"]
    tab.click("#clear")
    tab.fill("#group", "b")
    assert rows(tab) == ["B/0", "B/1"]
    tab.click("#clear")
    tab.fill("#search", "JAVASCRIPT:alert(4)")
    assert rows(tab) == ["B/0"]
    tab.click("#clear")
    tab.locator(".tabulator-col", has_text="length").click()
    assert rows(tab)[0] == "B/0"  # 5 tokens
    box = tab.locator("#histogram-length .u-over").bounding_box()
    tab.mouse.move(box["x"] + 1, box["y"] + 20)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 20, steps=4)
    tab.mouse.up()
    assert sorted(rows(tab)) == ["A/0", "A/1", "B/1"]  # of 2 to 5 tokens the lower half
    assert (tab.input_value("#length-from"), tab.input_value("#length-to")) == ("2", "3")
    assert seen.complaints == []


@pytest.mark.slow
def test_the_table_counts_the_policy_s_turns(opened: tuple[Any, Seen]) -> None:
    """Of B/0's four spans two are the policy's, of A/1's two one."""
    tab, _ = opened
    counted = tab.locator(".tabulator-row .tabulator-cell[tabulator-field=turns]").all_inner_texts()
    assert dict(zip(rows(tab), counted, strict=True)) == {"A/1": "1", "A/0": "1", "B/0": "2", "B/1": "1"}


@pytest.mark.slow
def test_turns_strip_and_keys(opened: tuple[Any, Seen]) -> None:
    """B/0 in four turns; its third action, token 4, has value .3; é is one character of two tokens."""
    tab, seen = opened
    tab.locator(".tabulator-row", has_text="B/0").click()
    assert tab.locator(".turn h3 b").all_inner_texts() == ["user", "assistant", "user", "assistant"]
    tab.keyboard.press("3")
    assert tab.locator(".turn.generated").first.locator("span").all_inner_texts() == ["é", "‿", "b"]
    assert tab.inner_text("#token").split()[:4] == ["token", "2", "id", "20"]
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    told = tab.inner_text("#token")
    assert "token 4" in told and "value 0.300" in told and "advantage 0.651" in told and "gap 0.25" in told
    colours = tab.evaluate(
        "[...document.querySelectorAll('.strip span')].map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len({c for c in colours if c != "rgba(0, 0, 0, 0)"}) == 5  # .1 .2 .3 .4 .6
    assert [c == "rgba(0, 0, 0, 0)" for c in colours] == [s == "·" for s in "··111···11"]
    tab.keyboard.press("ArrowDown")
    assert tab.inner_text("#one h2") == "B/1" and "timeout after 10 s" in tab.inner_text("#one")
    tab.keyboard.press("5")
    assert tab.locator(".strip span.outside").count() == 2  # in no loss
    tab.keyboard.press("g")
    assert rows(tab) == ["B/0", "B/1"]
    tab.keyboard.press("Escape")
    assert len(rows(tab)) == 4 and seen.complaints == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
