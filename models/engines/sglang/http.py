"""SGLang over HTTP: one server, ours or somebody's, as a Backend."""

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from models.engines.sglang.backend import Answer, Asked, BackendLost, BackendRefused, too_late

KEY = "SGLANG_API_KEY"  # environment variable
CONNECT_S = 10.0
CONTROL_S = 60.0  # of calls that only ask or tell
LOOK_S = 0.2
TRIES = 3  # of a call whose repetition changes nothing
PASSING = (408, 429)  # of the answers below 500


class _Cut(BackendLost):
    """The connection could not be made or broke, or the server failed."""


class _Unreached(_Cut):
    """No connection, so nothing was asked."""


class Served:
    """A Backend (backend.py). Each call has its own connections: one kept open may be closed just when it is used.

    `abort` and `close` end only what was asked through this object: others may use the server too.
    """

    def __init__(self, url: str, batch: int, timeout_s: float, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._connections = 2 * batch  # one batch runs, the next waits at the server
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._aborting, self._closed = threading.Event(), threading.Event()

    @functools.cached_property
    def device(self) -> str:
        return str(self._call("GET", "/server_info").get("device"))

    def generate(self, asked: Sequence[Asked], arrived: Callable[[int, Answer], None], timeout_s: float) -> None:
        self._aborting.clear()
        if asked:
            asyncio.run(self._generate(asked, arrived, timeout_s))

    def abort(self) -> None:
        self._aborting.set()

    def load_folder(self, folder: Path, tag: str) -> None:
        update = {"model_path": str(folder.absolute()), "weight_version": tag, "flush_cache": True}
        self._call("POST", "/pause_generation", {"mode": "retract"})
        try:
            self._call("POST", "/update_weights_from_disk", update, self._timeout_s)
        except BackendRefused as refused:
            raise BackendRefused(
                f"{refused}; a server on another machine must see {folder} under the same path: share the file system"
            ) from refused
        finally:
            self._call("POST", "/continue_generation", {})

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], folder: Path, tag: str) -> None:
        """From the folder: they would travel as text otherwise."""
        del tensors
        self.load_folder(folder, tag)

    def serving(self) -> str:
        return str(self._call("GET", "/model_info").get("weight_version"))

    def checksums(self) -> list[dict[str, str]]:
        said = self._call("POST", "/weights_checker", {"action": "checksum"}, self._timeout_s)
        if not said.get("ranks"):
            raise BackendRefused(f"SGLang at {self.url} cannot hash its weights: {said.get('message')}")
        return [dict(rank["checksums"]) for rank in said["ranks"]]

    def close(self) -> None:
        self._closed.set()

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float = CONTROL_S) -> Any:
        """The answer to a call that may be repeated."""

        async def call() -> Any:
            async with self._session(timeout_s) as session:
                return await _retrying(_Cut)(self._ask, session, method, path, body)

        return asyncio.run(call())

    async def _generate(self, asked: Sequence[Asked], arrived: Callable[[int, Answer], None], timeout_s: float) -> None:
        flying: set[str] = set()
        lost: list[BackendLost] = []
        free = asyncio.Semaphore(self._connections)

        async def one(session: aiohttp.ClientSession, place: int, request: Asked) -> None:
            async with free:
                if self._aborting.is_set():
                    return arrived(place, _never_sent())
                flying.add(request.name)
                try:
                    answer = await self._completed(session, request)
                except BackendLost as error:
                    return lost.append(error)
                finally:
                    flying.discard(request.name)
            arrived(place, answer)

        async with self._session(None) as session:
            tasks = {asyncio.create_task(one(session, place, request)) for place, request in enumerate(asked)}
            late = await self._watch(session, tasks, flying, timeout_s)
            await self._leave(session, tasks, flying)
        for task in tasks - late:
            task.result()
        if self._closed.is_set():
            raise BackendLost(f"SGLang at {self.url} was given up")
        if late:
            raise too_late(len(late), len(asked), timeout_s)
        if lost:
            raise lost[0]

    async def _watch(
        self, session: aiohttp.ClientSession, tasks: set[asyncio.Task[None]], flying: set[str], timeout_s: float
    ) -> set[asyncio.Task[None]]:
        """Wait for all, a refusal, the time limit, or `close`; those that are not done."""
        loop = asyncio.get_running_loop()
        late, end = tasks, loop.time() + timeout_s
        while late and (left := end - loop.time()) > 0 and not self._closed.is_set():
            done, late = await asyncio.wait(late, timeout=min(left, LOOK_S), return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                return late
            if self._aborting.is_set():
                await self._abort(session, flying)
        return late

    async def _leave(self, session: aiohttp.ClientSession, tasks: set[asyncio.Task[None]], flying: set[str]) -> None:
        """Forget what is not done, and let the server forget it."""
        names = set(flying)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._abort(session, names)

    async def _abort(self, session: aiohttp.ClientSession, names: set[str]) -> None:
        async def abort(name: str) -> None:
            with contextlib.suppress(BackendLost, BackendRefused):
                async with asyncio.timeout(CONNECT_S):
                    await self._ask(session, "POST", "/abort_request", {"rid": name})

        await asyncio.gather(*(abort(name) for name in names))

    async def _completed(self, session: aiohttp.ClientSession, request: Asked) -> Answer:
        """Asked again only if it was not asked: what the server may be generating is never asked for twice."""
        body = {
            "rid": request.name,
            "input_ids": request.token_ids,
            "sampling_params": request.sampling,
            "return_logprob": True,
        }
        answer = await _retrying(_Unreached)(self._ask, session, "POST", "/generate", body)
        meta = answer.get("meta_info", {})
        if (name := meta.get("id")) != request.name:
            raise BackendLost(f"SGLang at {self.url} answered to {name!r} where {request.name!r} was asked")
        if meta.get("finish_reason", {}).get("type") == "abort" and not self._aborting.is_set():
            raise BackendLost(f"SGLang at {self.url} aborted {request.name!r}, which was not asked of it")
        return answer

    def _session(self, timeout_s: float | None) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(timeout_s, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, body: Any) -> Any:
        try:
            async with session.request(method, self.url + path, json=body) as response:
                return self._read(path, response.status, await response.text())
        except aiohttp.ClientConnectorError as error:
            raise _Unreached(self._lost(path, str(error))) from error
        except TimeoutError as error:
            raise BackendLost(self._lost(path, "no answer in time")) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Cut(self._lost(path, str(error) or type(error).__name__)) from error

    def _read(self, path: str, status: int, text: str) -> Any:
        if status >= 500 or status in PASSING:
            raise _Cut(self._lost(path, f"status {status}, {_reason(text)}"))
        if status >= 400:
            hint = {401: f"; set {KEY}", 403: f"; set {KEY}", 404: "; is it an SGLang server?"}.get(status, "")
            raise BackendRefused(f"SGLang at {self.url} refuses {path}: status {status}, {_reason(text)}{hint}")
        said = _json(text) if text else {}
        if not isinstance(said, dict):
            raise _Cut(self._lost(path, f"its answer is no JSON object: {text[:100]!r}"))
        return said

    def _lost(self, path: str, reason: str) -> str:
        return f"SGLang at {self.url} does not answer {path}: {reason}"


def _retrying(passing: type[BackendLost]) -> AsyncRetrying:
    return AsyncRetrying(
        retry=retry_if_exception_type(passing),
        stop=stop_after_attempt(TRIES),
        wait=wait_random_exponential(multiplier=0.1, max=1.0),
        reraise=True,
    )


def _reason(text: str) -> str:
    """What SGLang says in an error: {error: {message}}, {message} or {detail}."""
    said = _json(text)
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    return str(said)[:500]


def _json(text: str) -> Any:
    """What is no JSON stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _never_sent() -> Answer:
    return {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}}
