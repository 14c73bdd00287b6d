"""Search services on the web: Serper and SerpApi."""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from models.tools.hits import Hit, SearchFailed

ATTEMPTS = 3
TRANSIENT = {429, 500, 502, 503, 504}


class _Row(BaseModel):
    title: str = ""
    link: str = ""
    snippet: str = ""


class _Page(BaseModel):
    organic: list[_Row] = []  # Serper
    organic_results: list[_Row] = []  # SerpApi


class _TryAgain(SearchFailed):
    """Another attempt may do."""


@dataclass(frozen=True)
class Service:
    """A service: where it is, which variable has its key, and how it is asked."""

    url: str
    key: str
    ask: Callable[[str, str, int], dict[str, Any]]  # key, query, how many -> arguments of a request


def _serper(key: str, query: str, most: int) -> dict[str, Any]:
    return {"method": "POST", "headers": {"X-API-KEY": key}, "json": {"q": query, "num": most}}


def _serpapi(key: str, query: str, most: int) -> dict[str, Any]:
    return {"method": "GET", "params": {"engine": "google", "q": query, "num": most, "api_key": key}}


SERVICES = {
    "serper": Service("https://google.serper.dev/search", "SERPER_API_KEY", _serper),
    "serpapi": Service("https://serpapi.com/search.json", "SERPAPI_API_KEY", _serpapi),
}


class WebSearch:
    """Asks one service. What is raised never has the key, which SerpApi wants in the address."""

    def __init__(self, name: str, timeout_s: float, base_url: str | None) -> None:
        """Raises ValueError without the key. timeout_s: of a query, with all attempts."""
        service = SERVICES[name]
        key = os.environ.get(service.key)
        if not key:
            raise ValueError(f"search: backend {name!r} needs its key in the environment: set {service.key}")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses
        self._name, self._ask, self._key = name, service.ask, key
        self._url, self._timeout_s = base_url or service.url, timeout_s

    async def find(self, query: str, most: int) -> list[Hit]:
        """Raises SearchFailed."""
        tries = AsyncRetrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(0.25, 2.0),
            retry=retry_if_exception_type(_TryAgain),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s), httpx.AsyncClient(timeout=self._timeout_s) as client:
                return await tries(self._once, client, query, most)
        except TimeoutError:
            raise SearchFailed(f"{self._name} did not answer within {self._timeout_s:g} s") from None

    async def _once(self, client: httpx.AsyncClient, query: str, most: int) -> list[Hit]:
        try:
            answer = await client.request(url=self._url, **self._ask(self._key, query, most))
        except httpx.HTTPError as error:
            raise _TryAgain(f"{self._name} cannot be reached ({type(error).__name__})") from None
        if answer.status_code != 200:
            kind = _TryAgain if answer.status_code in TRANSIENT else SearchFailed
            raise kind(f"{self._name} answers HTTP {answer.status_code}")
        try:
            page = _Page.model_validate_json(answer.content)
        except ValidationError:
            raise SearchFailed(f"{self._name} answers something that is no list of results") from None
        return [Hit(row.snippet, row.title, row.link) for row in (page.organic or page.organic_results)[:most]]
