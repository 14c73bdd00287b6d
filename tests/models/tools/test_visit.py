"""Pages for the model: what it reads of them, and the addresses it is kept from."""

import asyncio
import gzip
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import pytest

from models.tools.visit import READ, Visit, VisitRefused, _public
from tests.models.tools.web import Web, answer, web

PAGE = b"""<html><head><title>Bees</title><script>var spy = 1;</script></head><body><nav><a href="/">Home</a></nav>
<article><h1>Bees</h1><p>A bee has six legs and four wings, and lives with many others in a hive.</p>
<p>Honey is made of nectar, which bees carry home from flowers near and far.</p></article></body></html>"""


@pytest.fixture
def site() -> Iterator[Web]:
    with web() as running:
        yield running


visit = Visit(timeout_s=60.0, allow_private=True)


def test_reads_the_text_of_a_page(site: Web) -> None:
    site.answers["/"] = answer(PAGE, "text/html; charset=utf-8")
    text = visit(site.url)
    assert "six legs" in text
    assert "Honey is made" in text
    assert "spy" not in text
    assert "<" not in text


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("grün".encode("latin-1"), "text/plain; charset=latin-1", "grün"),
        ("grün".encode(), "text/plain", "grün"),
        (b"gr\xff", "text/plain; charset=no-such", "gr\ufffd"),
        (b"gr\xff", "text/plain; charset=hex", "gr\ufffd"),
        (b'{"a": 1}', "Application/JSON", '{"a": 1}'),
        (b"<p>Hi</p>", "text/html", "Hi"),
        (b"", "text/html", ""),
    ],
)
def test_reads_by_type_and_charset(site: Web, body: bytes, kind: str, text: str) -> None:
    site.answers["/"] = answer(body, kind)
    assert visit(site.url) == text


def test_unpacks_gzip_to_its_limit(site: Web) -> None:
    """100 MB of one letter are 100 kB on the way; 2 MB are unpacked, of which 90,000 characters are shown."""
    site.answers["/small"] = answer(gzip.compress(b"hello"), "text/plain", Content_Encoding="gzip")
    site.answers["/bomb"] = answer(gzip.compress(b"a" * 100_000_000), "text/plain", Content_Encoding="gzip")
    site.answers["/br"] = answer(b"hello", "text/plain", Content_Encoding="br")
    assert visit(f"{site.url}/small") == "hello"
    assert f"[{READ - 90_000} characters left out]" in visit(f"{site.url}/bomb")
    with pytest.raises(VisitRefused, match="packed as 'br'"):
        visit(f"{site.url}/br")
    site.answers["/damaged"] = answer(b"hello", "text/plain", Content_Encoding="gzip")
    with pytest.raises(VisitRefused, match="the page is damaged"):
        visit(f"{site.url}/damaged")


def test_follows_redirects_but_not_for_ever(site: Web) -> None:
    site.answers["/a"] = answer(b"", status=302, Location="b?c=d")
    site.answers["/b"] = answer(b"there", "text/plain")
    site.answers["/loop"] = answer(b"", status=301, Location="/loop")
    assert visit(f"{site.url}/a") == "there"
    assert site.asked == ["GET /a HTTP/1.1", "GET /b?c=d HTTP/1.1"]
    with pytest.raises(VisitRefused, match="more than 5 redirects"):
        visit(f"{site.url}/loop")
    assert len(site.asked) == 2 + 6


@pytest.mark.parametrize("status", [403, 404, 500, 304])
def test_tells_of_errors_of_the_server(site: Web, status: int) -> None:
    site.answers["/"] = answer(b"", status=status)
    with pytest.raises(VisitRefused, match=f"HTTP {status}"):
        visit(site.url)


@pytest.mark.parametrize("kind", ["application/pdf", "image/png", "application/octet-stream", ""])
def test_other_types_are_not_read(site: Web, kind: str) -> None:
    site.answers["/"] = answer(b"x", kind)
    with pytest.raises(VisitRefused, match="only text/html, text/plain, application/json are read"):
        visit(site.url)


def endless(part: bytes, pause_s: float = 0.0) -> object:
    def send(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/plain")
        request.end_headers()
        try:
            while True:
                request.wfile.write(part)
                time.sleep(pause_s)
        except OSError:
            pass

    return send


def test_an_endless_body_is_cut(site: Web) -> None:
    site.answers["/"] = endless(b"abcdefgh" * 10_000)  # type: ignore[assignment]
    text = visit(site.url)
    assert text.endswith(f"[only the first {READ} bytes of the page were read]")
    assert len(text) < 90_200


def test_a_body_that_trickles_is_given_up(site: Web) -> None:
    """Each byte comes in time, but they do not end."""
    site.answers["/"] = endless(b"a", 0.05)  # type: ignore[assignment]
    with pytest.raises(VisitRefused, match=r"within 0\.5 s"):
        Visit(timeout_s=0.5, allow_private=True)(site.url)


def test_a_page_that_keeps_the_parser_busy_is_given_up(site: Web) -> None:
    """Of 150,000 attributes, each compared with all others: minutes."""
    attributes = " ".join(f"a{i}=1" for i in range(150_000))
    site.answers["/"] = answer(f"<html><body><p {attributes}>Hi".encode())
    with pytest.raises(VisitRefused, match="takes too long to read"):
        Visit(timeout_s=3.0, allow_private=True)(site.url)  # which suffices to fetch it, also beside other work


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(VisitRefused, match="ConnectError"):
        visit(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",  # 127.0.0.1 as one number
        "0x7f000001",
        "0177.0.0.1",
        "0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "[fe80::1]",
        "[fd00::1]",
        "224.0.0.1",
        "[ff02::1]",
        "255.255.255.255",
        "[64:ff9b::7f00:1]",  # NAT64
        "[2002:7f00:1::]",  # 6to4
        "[2001:0:4136:e378:8000:63bf:80ff:fffe]",  # Teredo
    ],
)
def test_private_addresses_are_refused(site: Web, host: str) -> None:
    with pytest.raises(VisitRefused, match=r"private network|no address of a page"):
        Visit()(f"http://{host}:{site.port}/")
    assert site.asked == []


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:8.8.8.8"])
def test_public_addresses_are_not(address: str) -> None:
    assert _public(address)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "no http or https address"),
        ("ftp://example.com/", "no http or https address"),
        ("gopher://127.0.0.1/", "no http or https address"),
        ("example.com", "no http or https address"),
        ("http://", "no http or https address"),
        ("", "no http or https address"),
        ("http://user:secret@example.com/", "user name or password"),
        ("http://user@127.0.0.1/", "user name or password"),
        ("http://exa mple.com/", "no host|no address"),
        ("http://[::1/", "no address of a page"),
        ("http://example.com:99999999/", "no address of a page|no host"),
        ("http://a\x00b/", "no address of a page"),
        ("http://no-such-host.invalid/", "there is no host 'no-such-host.invalid'"),
    ],
)
def test_other_addresses_are_refused(url: str, why: str) -> None:
    with pytest.raises(VisitRefused, match=why):
        Visit()(url)


class Names:
    """A name server of the test's: what it says a name means, one answer after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self._answers = list(answers)
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", self._found)

    async def _found(self, host: str, port: object, **_: object) -> list[tuple[object, ...]]:
        families = {False: socket.AF_INET, True: socket.AF_INET6}
        return [
            (families[":" in address], socket.SOCK_STREAM, 6, "", (address, port)) for address in self._answers.pop(0)
        ]


def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, ["93.184.215.14", "127.0.0.1"])
    with pytest.raises(VisitRefused, match=r"evil\.example is on a private network"):
        Visit()("http://evil.example/")


def test_each_redirect_is_checked(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address passes for public; where it leads to does not."""
    site.answers["/"] = answer(b"", status=302, Location="http://169.254.169.254/latest/meta-data")
    site.answers["/file"] = answer(b"", status=302, Location="file:///etc/passwd")
    monkeypatch.setattr("models.tools.visit._public", lambda address: address == "127.0.0.1")
    with pytest.raises(VisitRefused, match=r"169\.254\.169\.254 is on a private network"):
        Visit()(site.url)
    with pytest.raises(VisitRefused, match="no http or https address"):
        Visit()(f"{site.url}/file")


def test_connects_to_the_address_that_was_checked(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name means another address at a second look, which never comes; the server still hears the name."""
    heard = []

    def hear(request: BaseHTTPRequestHandler) -> None:
        heard.append(request.headers["Host"])
        answer(b"hello", "text/plain")(request)

    site.answers["/"] = hear
    Names(monkeypatch, ["127.0.0.1"])
    assert visit(f"http://rebound.example:{site.port}/") == "hello"
    assert heard == [f"rebound.example:{site.port}"]


def test_ipv4_is_taken_before_ipv6(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing listens."""
    site.answers["/"] = answer(b"hello", "text/plain")
    Names(monkeypatch, ["::1", "127.0.0.1"])
    assert visit(f"http://both.example:{site.port}/") == "hello"


def test_tls_is_for_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the address: the name is in what a client says first."""
    Names(monkeypatch, ["127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(first_words, server)
        with pytest.raises(VisitRefused, match="cannot be read"):
            visit(f"https://rebound.example:{server.getsockname()[1]}/")
        assert b"rebound.example" in heard.result()


def first_words(server: socket.socket) -> bytes:
    with server.accept()[0] as connection:
        return connection.recv(4096)


def test_proxies_of_the_environment_are_not_asked(site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    site.answers["/"] = answer(b"hello", "text/plain")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert visit(site.url) == "hello"
