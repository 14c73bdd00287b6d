"""Search: a local index, and services on the web by a stand-in that speaks as they do."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from models.environments.tools import make_tool
from models.tools.search import Search
from tests.models.tools.web import Web, answer, web

KEY = "key-not-to-be-seen"


@pytest.fixture
def index(tmp_path: Path) -> str:
    rows = [
        {"title": "Bees", "text": "Bees make honey. Honey is sweet.", "url": "http://bees"},
        {"text": "A bear likes honey and sleeps in winter, when it is cold and there is nothing else to do."},
        {"title": "C", "text": "A language of 1972"},
    ]
    path = tmp_path / "index.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(path)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    monkeypatch.setenv("SERPAPI_API_KEY", KEY)
    with web() as running:
        yield running


def test_ranks_passages(index: str) -> None:
    """Honey is twice in the short one, once in the long one, never in the third."""
    assert Search("bm25", index)("honey") == (
        "honey: 2 results\n1. Bees\n   http://bees\n   Bees make honey. Honey is sweet.\n"
        "2. A bear likes honey and sleeps in winter, when it is cold and there is nothing else to do."
    )
    assert Search("bm25", index, results=1)("Honey").count("\n1. Bees") == 1
    assert "2. " not in Search("bm25", index, results=1)("honey")


def test_finds_short_words_and_titles_and_nothing(index: str) -> None:
    search = Search("bm25", index)
    assert search("c").startswith("c: 1 results\n1. C\n")
    assert search("whale") == "whale: 0 results"
    assert search("?!") == "?!: 0 results"
    assert search("") == ": 0 results"


def test_several_queries_in_their_order(index: str) -> None:
    first, second = Search("bm25", index)(["1972", "winter"]).split("\n\n")
    assert first.startswith("1972: 1 results\n1. C")
    assert second.startswith("winter: 1 results\n1. A bear")


def test_many_threads_ask_one_index(index: str) -> None:
    search = Search("bm25", index)
    words = ["honey", "winter", "1972", "whale"] * 50
    expected = {word: search(word) for word in words}
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(search, words)) == [expected[word] for word in words]


def test_schema_and_sharing(index: str) -> None:
    tool = make_tool(Search, {"backend": "bm25", "index": index})
    assert (tool.name, tool.stateful, tool.make() is tool.make()) == ("search", False, True)
    query = tool.schema["function"]["parameters"]["properties"]["query"]  # type: ignore[index,call-overload]
    assert query == {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 8}]
    }


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"title": "x"}', "index.jsonl:2: no passage .text: Field required"),
        ("{", "index.jsonl:2: no passage"),
        ("[1]", "index.jsonl:2: no passage"),
    ],
)
def test_a_row_that_is_no_passage_is_named(tmp_path: Path, row: str, why: str) -> None:
    (tmp_path / "index.jsonl").write_text(f'{{"text": "a"}}\n{row}\n')
    with pytest.raises(ValueError, match=why):
        Search("bm25", str(tmp_path / "index.jsonl"))


def test_settings_that_do_not_fit(tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    (tmp_path / "empty.jsonl").write_text("\n")
    for arguments, why in [
        (("bm25",), "bm25 needs an index, no other has one"),
        (("serper", index), "bm25 needs an index, no other has one"),
        (("google",), "none of bm25, serper, serpapi"),
        (("serper",), "set SERPER_API_KEY"),
        (("bm25", "/no/such"), "is not a file"),
        (("bm25", str(tmp_path / "empty.jsonl")), "has no passage"),
    ]:
        with pytest.raises(ValueError, match=why):
            Search(*arguments)


def test_asks_serper(service: Web) -> None:
    seen = []

    def serve(request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        seen.append((request.command, request.headers["X-API-KEY"], body))
        rows = [{"title": f"T{i}", "link": f"http://{i}", "snippet": f"S{i}", "position": i} for i in range(3)]
        answer(json.dumps({"searchParameters": {}, "organic": rows}).encode(), "application/json")(request)

    service.answers["/search"] = serve
    search = Search("serper", results=2, base_url=f"{service.url}/search")
    assert search("bees") == "bees: 2 results\n1. T0\n   http://0\n   S0\n2. T1\n   http://1\n   S1"
    assert seen == [("POST", KEY, {"q": "bees", "num": 2})]


def test_asks_serpapi(service: Web) -> None:
    found = {"search_metadata": {}, "organic_results": [{"title": "T", "link": "http://t"}]}
    service.answers["/search.json"] = answer(json.dumps(found).encode(), "application/json")
    search = Search("serpapi", base_url=f"{service.url}/search.json")
    assert search("two words") == "two words: 1 results\n1. T\n   http://t"
    assert service.asked == [f"GET /search.json?engine=google&q=two+words&num=5&api_key={KEY} HTTP/1.1"]


def test_tries_again_and_then_tells(service: Web) -> None:
    """503 and 429 twice and then an answer; 500 three times; 403 once."""
    statuses = {"/mend": [503, 429], "/broken": [500] * 9, "/forbidden": [403] * 9}

    def serve(request: BaseHTTPRequestHandler) -> None:
        left = statuses[request.path.partition("?")[0]]
        answer(b'{"organic": []}', "application/json", left.pop(0) if left else 200)(request)

    service.answers = dict.fromkeys(statuses, serve)
    ask = {path: Search("serper", base_url=service.url + path) for path in statuses}
    assert ask["/mend"]("q") == "q: 0 results"
    assert ask["/broken"]("q") == "q: Error: serper answers HTTP 500"
    assert ask["/forbidden"]("q") == "q: Error: serper answers HTTP 403"
    assert {path: sum(path in line for line in service.asked) for path in statuses} == {
        "/mend": 3,
        "/broken": 3,
        "/forbidden": 1,
    }


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"organic": 3}'])
def test_an_answer_that_is_none(service: Web, body: bytes) -> None:
    service.answers["/"] = answer(body)
    assert Search("serper", base_url=service.url)("q") == (
        "q: Error: serper answers something that is no list of results"
    )


def test_the_key_is_in_no_error_and_no_log(service: Web, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service.answers["/"] = answer(b"", status=401)
    for url in (service.url, "http://127.0.0.1:1/"):
        told = Search("serpapi", base_url=url)("q")
        assert told.startswith("q: Error: serpapi ")
        assert KEY not in told
    assert KEY not in caplog.text
    assert any(KEY in line for line in service.asked)


def test_gives_up_in_time(service: Web) -> None:
    def hang(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read()  # until the other side has gone

    service.answers["/"] = hang
    told = Search("serper", timeout_s=0.3, base_url=service.url)(["a", "b"])
    assert told == "a: Error: serper did not answer within 0.3 s\n\nb: Error: serper did not answer within 0.3 s"
