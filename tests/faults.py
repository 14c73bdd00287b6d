"""A proxy that stands between the product and a real server and breaks what a test asks it to break.

It forwards bytes as they are (S3 signs the Host header) and understands just enough HTTP to tell one request from the
next. Each fault counts how often it took place.
"""

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER
BODILESS = (b"204", b"304")
GRAIN = 4096  # bytes of a slow answer sent at once


@dataclass
class Fault:
    """What happens to requests of a method (regular expression) whose path matches, for the first `times` of them."""

    method: str = ".*"
    path: str = ""
    times: int = 1_000_000
    count: int = field(default=0, init=False)  # how often it took place

    def meets(self, method: str, path: str) -> bool:
        return self.count < self.times and bool(re.fullmatch(self.method, method) and re.search(self.path, path))


@dataclass
class Answers(Fault):
    """The server answers with an error of its own; the request did nothing."""

    status: int = 503
    body: bytes = b""


@dataclass
class Slow(Fault):
    """The answer begins late, and comes in small pieces."""

    delay_s: float = 0.0
    pause_s: float = 0.0  # between pieces


@dataclass
class Truncated(Fault):
    """The connection ends before the body does."""

    keep: int = 0  # bytes of the body


@dataclass
class Shortened(Fault):
    """The body is cut and its Content-Length agrees; `unseen`: S3's checksum, which would tell, is left out too."""

    keep: int = 0
    unseen: bool = True


@dataclass
class Reset(Fault):
    """The connection is reset, with the request `done` (its answer is lost) or not."""

    done: bool = False


@dataclass
class _Message:
    head: bytes
    body: bytes

    @property
    def first(self) -> list[bytes]:
        """Words of the first line."""
        return self.head.split(b"\r\n", 1)[0].split(b" ", 2)


class Proxy:
    """Listens on a loopback port of its own from `open` to `close`. Its methods are called by the test's thread."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._faults: list[Fault] = []
        self.port = 0
        self.seen: list[str] = []  # method and path of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        self._thread.start()
        self.come_back()

    def close(self) -> None:
        self.go_away()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def go_away(self) -> None:
        """From now on connections are refused, and those that are open end."""
        self._do(self._stop())

    def come_back(self) -> None:
        self._do(self._start())

    @contextlib.contextmanager
    def breaking[F: Fault](self, fault: F) -> Iterator[F]:
        """The fault takes place while the block runs."""
        self._faults.append(fault)
        try:
            yield fault
        finally:
            self._faults.remove(fault)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, with one of its own to the server."""
        self._open.add(writer)
        upstream: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            answers, upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            while await self._exchange(reader, writer, answers, upstream):
                pass
        self._open.discard(writer)
        for one in filter(None, (writer, upstream)):
            one.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; whether the connection goes on."""
        request = await _receive(reader, writer)
        method, path = (word.decode() for word in request.first[:2])
        self.seen.append(f"{method} {path}")
        fault = next((fault for fault in self._faults if fault.meets(method, path)), None)
        if fault is not None:
            fault.count += 1
        if isinstance(fault, Answers):
            head = f"HTTP/1.1 {fault.status} Injected\r\nContent-Length: {len(fault.body)}\r\n\r\n"
            writer.write(head.encode() + fault.body)
            await writer.drain()
            return True
        if isinstance(fault, Reset) and not fault.done:
            _reset(writer)
            return False
        upstream.write(request.head + request.body)
        if _header(request.head, b"upgrade"):
            await asyncio.gather(_pipe(reader, upstream), _pipe(answers, writer))
            return False
        answer = await _receive(answers, None, bodiless=method == "HEAD")
        return await _relay(answer, writer, fault)


async def _relay(answer: _Message, writer: asyncio.StreamWriter, fault: Fault | None) -> bool:
    """Hand on an answer, or what a fault leaves of it; whether the connection goes on."""
    if isinstance(fault, Reset):
        _reset(writer)
        return False
    if isinstance(fault, Truncated):
        writer.write(answer.head + answer.body[: fault.keep])
        await writer.drain()
        return False
    if isinstance(fault, Shortened):
        body = answer.body[: fault.keep]
        length = b"\r\nContent-Length: %d" % len(body)
        head = re.sub(rb"\r\ncontent-length:[^\r]*", length, answer.head, flags=re.I)
        answer = _Message(re.sub(rb"\r\nx-amz-checksum[^\r]*", b"", head, flags=re.I) if fault.unseen else head, body)
    if isinstance(fault, Slow):
        await asyncio.sleep(fault.delay_s)
        writer.write(answer.head)
        for start in range(0, len(answer.body), GRAIN):
            writer.write(answer.body[start : start + GRAIN])
            await writer.drain()
            await asyncio.sleep(fault.pause_s)
        return True
    writer.write(answer.head + answer.body)
    await writer.drain()
    return not re.search(rb"\r\nconnection: *close", answer.head, re.I)


async def _receive(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None, bodiless: bool = False
) -> _Message:
    """A whole request (its sender, `writer`, is told to go on if it waits for that) or a whole answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    message = _Message(head, b"")
    if writer is None and message.first[1].startswith(b"1"):
        return await _receive(reader, writer, bodiless) if message.first[1] != b"101" else message
    if writer is not None and _header(head, b"expect"):
        message.head = re.sub(rb"\r\nexpect:[^\r]*", b"", head, flags=re.I)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if bodiless or (writer is None and message.first[1] in BODILESS):
        return message
    if length := _header(head, b"content-length"):
        message.body = await reader.readexactly(int(length))
    elif _header(head, b"transfer-encoding"):
        message.body = await _chunks(reader)
    elif writer is None:
        message.body = await reader.read()
    return message


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body as it is sent, without trailers."""
    body = bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if size == 0:
            return bytes(body)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(GRAIN):
        writer.write(data)
        await writer.drain()
    writer.close()


def _header(head: bytes, name: bytes) -> bytes:
    """Its value, empty if it is not there."""
    found = re.search(rb"\r\n" + name + rb": *([^\r]*)", head, re.I)
    return found[1] if found else b""


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """A proxy for a server on a loopback port."""
    made = Proxy(port)
    made.open()
    try:
        yield made
    finally:
        made.close()
