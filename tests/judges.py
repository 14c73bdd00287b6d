"""A judge as a real HTTP server, whose answers a test chooses."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (status, body, seconds before it is sent); a body that is text is the judge's, in the protocol's clothes.
type Answer = tuple[int, str | bytes, float]


@dataclass
class JudgeServer:
    url: str
    answer: Callable[[dict[str, Any]], Answer]
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[JudgeServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.asked.append(body)
            told.keys.append(self.headers.get("Authorization"))
            told.paths.append(self.path)
            status, said, seconds = told.answer(body)
            time.sleep(seconds)
            data = said if isinstance(said, bytes) else json.dumps(chat(said)).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                return  # who asked has gone

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told = JudgeServer(f"http://127.0.0.1:{server.server_port}/v1", answer)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()


def chat(said: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
