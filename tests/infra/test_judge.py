"""The judge's client against a real server: what is an answer, what is an outage, and what is tried again."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from data.config import JudgeConfig
from infra import judge as judging
from infra.judge import JudgeLost, answer
from tests.judges import JudgeServer, judge_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(judging, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with judge_server(lambda body: (200, "Correct.", 0.0)) as made:
        yield made


def config(server: JudgeServer, **changes: Any) -> JudgeConfig:
    return JudgeConfig(**({"url": server.url, "model": "m", "timeout_s": 5.0} | changes))


def test_what_is_asked_and_what_is_said(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(config(server), "Is it?") == "Correct."
    monkeypatch.setenv("JUDGE_API_KEY", "s3cret")
    assert answer(config(server, url=f"{server.url}/"), "Is it, é?") == "Correct."
    assert server.asked == [
        {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0}
        for text in ("Is it?", "Is it, é?")
    ]
    assert server.keys == [None, "Bearer s3cret"] and set(server.paths) == {"/v1/chat/completions"}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ((503, b"busy", 0.0), "status 503"),
        ((429, b"slow down", 0.0), "status 429"),
        ((200, b"<html>", 0.0), "an answer without text"),
        ((200, b'{"choices": []}', 0.0), "an answer without text"),
        ((200, b'{"choices": [{"message": {"content": null}}]}', 0.0), "an answer without text"),
        ((200, b"[1]", 0.0), "an answer without text"),
        ((200, " \n", 0.0), "an answer without text"),
        ((200, "correct", 1.5), "ReadTimeout"),
    ],
)
def test_an_outage_is_no_verdict(server: JudgeServer, bad: Any, says: str) -> None:
    """Twice bad is an error that names judge and fix; once bad, the second answer counts."""
    server.answer = lambda body: bad
    lost = config(server, attempts=2, timeout_s=0.3)
    with pytest.raises(JudgeLost, match=rf"judge m at http://127\.0\.0\.1:\d+/v1: {says}.*, 2 times; start it"):
        answer(lost, "?")
    assert len(server.asked) == 2
    server.answer = lambda body: bad if len(server.asked) < 4 else (200, "yes", 0.0)
    assert answer(lost, "?") == "yes" and len(server.asked) == 4


def test_a_refusal_is_not_tried_again_and_tells_no_key(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "s3cret")
    server.answer = lambda body: (401, b"bad key:\n s3cret", 0.0)
    with pytest.raises(JudgeLost, match=r"status 401, bad key: \*\*\*; mend reward.judge, or set JUDGE_API_KEY"):
        answer(config(server), "?")
    assert len(server.asked) == 1


def test_white_space_around_a_key_is_not_sent(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a key from a file has."""
    monkeypatch.setenv("JUDGE_API_KEY", " s3cret\n")
    assert answer(config(server), "?") == "Correct." and server.keys == ["Bearer s3cret"]


@pytest.mark.parametrize("key", ["s3c\nret", "s3cr\u00e9t"])
def test_a_key_that_no_header_holds_is_not_told(server: JudgeServer, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", key)
    with pytest.raises(JudgeLost, match=r"^JUDGE_API_KEY: .* not printable ASCII; set it to the judge's key") as caught:
        answer(config(server), "?")
    assert "s3c" not in str(caught.value) and not server.asked


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "LONGEST_PAUSE_S", 0.01)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = JudgeConfig(url=f"http://127.0.0.1:{probe.getsockname()[1]}/v1", model="m", attempts=2)
    with pytest.raises(JudgeLost, match=r"ConnectError .*, 2 times"):
        answer(gone, "?")
