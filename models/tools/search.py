"""Search for the model: in a local index, or on the web by a service."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from models.tools.bm25 import Index
from models.tools.excerpt import excerpt
from models.tools.hits import Hit, SearchFailed
from models.tools.web_search import SERVICES, WebSearch

SNIPPET = 1_000  # characters of a hit that the model sees
QUERIES = 8

Find = Callable[[str, int], Awaitable[list[Hit]]]


class Search:
    """Answers queries with titles, addresses and snippets. One instance, so one index, for all trajectories.

    backend: "bm25", over the JSONL file `index` (a row: {"text", "title"?, "url"?}), or "serper" or "serpapi", with
    their key in SERPER_API_KEY or SERPAPI_API_KEY of the environment. base_url: a server that speaks the same.
    """

    name = "search"
    shared = True

    def __init__(
        self,
        backend: str,
        index: str | None = None,
        results: Annotated[int, Field(gt=0)] = 5,
        timeout_s: Annotated[float, Field(gt=0.0)] = 20.0,
        base_url: str | None = None,
    ) -> None:
        """Raises ValueError for settings that do not fit, a file that is no index, or without the service's key."""
        self._results = results
        self._find = _find(backend, index, timeout_s, base_url)

    def __call__(self, query: str | Annotated[list[str], Field(min_length=1, max_length=QUERIES)]) -> str:
        """Search for a query, or for several at once. Answers with titles, addresses and snippets."""
        queries = [query] if isinstance(query, str) else query
        return "\n\n".join(asyncio.run(self._all(queries)))

    async def _all(self, queries: list[str]) -> list[str]:
        return await asyncio.gather(*(self._told(query) for query in queries))

    async def _told(self, query: str) -> str:
        try:
            hits = await self._find(query, self._results)
        except SearchFailed as error:  # the other queries may have answers
            return f"{query}: Error: {error}"
        rows = [f"{number}. {_shown(hit)}" for number, hit in enumerate(hits, 1)]
        return "\n".join([f"{query}: {len(hits)} results", *rows])


def _find(backend: str, index: str | None, timeout_s: float, base_url: str | None) -> Find:
    if (backend == "bm25") != (index is not None):
        raise ValueError(f"search: backend = {backend!r} with index = {index!r}; bm25 needs an index, no other has one")
    if backend == "bm25":
        return Index.read(Path(str(index))).find
    if backend not in SERVICES:
        raise ValueError(f"search: backend = {backend!r} is none of bm25, {', '.join(SERVICES)}")
    return WebSearch(backend, timeout_s, base_url).find


def _shown(hit: Hit) -> str:
    return "\n   ".join(part for part in (hit.title, hit.url, excerpt(hit.text, SNIPPET)) if part)
