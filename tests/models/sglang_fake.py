"""An HTTP server that speaks as SGLang does, and fails as told. It computes nothing: an answer is 7 x its prompt."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

Fault = str | None  # reset, 500, 400, hang, text, other, abort, stale


class Fake:
    """`fault(n)` says what happens to the n-th request to generate, counted from 0."""

    def __init__(self, fault: Callable[[int], Fault] = lambda n: None, key: str | None = None) -> None:
        self.fault, self.key = fault, key
        self.version, self.paused, self.refuses_weights, self.ranks = "first", False, False, []
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.aborted: list[str] = []
        self.calls: Counter[str] = Counter()
        self._released: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        """From now on connections are refused."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> str:
        app = web.Application(middlewares=[self._authorised])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weights_from_disk", self._update),
                web.get("/model_info", self._model),
                web.get("/server_info", self._server),
                web.post("/weights_checker", self._check),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls[request.path] += 1
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name, version = body["rid"], self.version
        self.asked.append(name)
        fault, reason = self.fault(len(self.asked) - 1), "length"
        if fault == "reset":
            request.transport.abort()
        if fault == "500":
            return web.Response(status=500, text="Internal Server Error")
        if fault == "400":
            return web.json_response({"error": {"message": "the input is too long"}}, status=400)
        if fault == "text":
            return web.Response(text="<html>a proxy</html>")
        if fault == "hang":
            self._released[name] = asyncio.Event()
            await self._released[name].wait()
            reason = "abort"
        if fault == "abort":
            reason = "abort"
        if fault == "stale":
            version = "older"
        ids = [7 * token for token in body["input_ids"]]
        meta = {
            "id": "another" if fault == "other" else name,
            "weight_version": version,
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        self.answered.append(name)
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def _abort(self, request: web.Request) -> web.Response:
        name = (await request.json())["rid"]
        self.aborted.append(name)
        if name in self._released:
            self._released[name].set()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuses_weights or not self.paused:
            return web.json_response({"success": False, "message": "no such folder here"}, status=400)
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response({"device": "cuda"})

    async def _check(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "no weights here", "ranks": self.ranks})
