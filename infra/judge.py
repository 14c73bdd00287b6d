"""Asks a model behind an OpenAI-compatible address; what is no answer of it is raised and never counts as a verdict."""

import os
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from data.config import JudgeConfig

KEY = "JUDGE_API_KEY"  # environment variable
LONGEST_PAUSE_S = 8.0  # between two attempts
PASSING = (408, 429)  # of the answers below 500
LONGEST_REASON = 200  # characters of what the server said


class JudgeLost(RuntimeError):
    """The judge gave no answer: nobody knows whether the sample is right."""


class _Passing(JudgeLost):
    """May be otherwise the next time."""


def longest_s(judge: JudgeConfig) -> float:
    """Seconds that `answer` takes at most, all attempts together."""
    return judge.attempts * (judge.timeout_s + LONGEST_PAUSE_S)


def answer(judge: JudgeConfig, prompt: str) -> str:
    """What the judge says, at temperature 0. Raises JudgeLost after `judge.attempts`, or at once if it is refused."""
    tries = Retrying(
        stop=stop_after_attempt(judge.attempts),
        wait=wait_random_exponential(max=LONGEST_PAUSE_S),
        retry=retry_if_exception_type(_Passing),
        reraise=True,
    )
    try:
        return tries(_answer, judge, prompt)
    except _Passing as error:
        raise JudgeLost(f"{error}, {judge.attempts} times; start it, or set reward.judge.url") from None


def _answer(judge: JudgeConfig, prompt: str) -> str:
    key = _key()
    who = f"judge {judge.model} at {judge.url}"
    try:
        said = httpx.post(
            f"{str(judge.url).rstrip('/')}/chat/completions",
            json={"model": judge.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0},
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=judge.timeout_s,
        )
    except httpx.TransportError as error:
        raise _Passing(f"{who}: {type(error).__name__} {error}".rstrip()) from None
    if said.status_code >= 500 or said.status_code in PASSING:
        raise _Passing(f"{who}: status {said.status_code}")
    if said.status_code != 200:
        reason = " ".join(said.text[:LONGEST_REASON].split()).replace(key or "\n", "***")
        raise JudgeLost(f"{who}: status {said.status_code}, {reason}; mend reward.judge, or set {KEY}")
    return _content(who, said)


def _key() -> str | None:
    """Raises JudgeLost for one that no header can hold, which httpx would refuse with the key in its message."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise JudgeLost(f"{KEY}: holds a character that is not printable ASCII; set it to the judge's key and no more")
    return key or None


def _content(who: str, said: httpx.Response) -> str:
    """The text of the first choice. Raises _Passing for an answer that has none."""
    try:
        body: Any = said.json()
        content = body["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        content = None
    if not isinstance(content, str) or not content.strip():
        raise _Passing(f"{who}: an answer without text")
    return content
