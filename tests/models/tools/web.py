"""A web server on this machine, whose answers a test writes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Web:
    """url: where it is. asked: the lines that requests began with. answers: by path."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.asked: list[str] = []
        self.answers: dict[str, Answer] = {}


@contextmanager
def web() -> Iterator[Web]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append(self.requestline)
            made.answers[self.path.partition("?")[0]](self)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made = Web(server.server_port)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()


def answer(body: bytes, kind: str = "text/html", status: int = 200, **headers: str) -> Answer:
    def send(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return send
