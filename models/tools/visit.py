"""Web pages for the model, as text. Only public addresses, checked after names are resolved and after each redirect."""

import asyncio
import ipaddress
import socket
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
from pydantic import Field

from models.tools.excerpt import excerpt

READER = Path(__file__).with_name("page_text.py")
SHOWN = 90_000  # characters of a page that the model sees
READ = 2_000_000  # bytes of a page that are read
REDIRECTS = 5
TYPES = ("text/html", "text/plain", "application/json")
HEADERS = {"User-Agent": "rollbook", "Accept": ", ".join(TYPES), "Accept-Encoding": "gzip"}
UNICAST = ipaddress.ip_network("2000::/3")  # beyond it are ways to write IPv4 addresses
TUNNELS = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("2001::/32"))  # these too: 6to4, Teredo


class VisitRefused(ValueError):
    """A page that the model cannot have; it is told why."""


@dataclass(frozen=True)
class Page:
    data: bytes
    kind: str  # media type
    charset: str
    whole: bool


class Visit:
    """Reads pages by http and https. allow_private: also of this machine and its network, for tests."""

    name = "visit"
    shared = True

    def __init__(self, timeout_s: Annotated[float, Field(gt=0.0)] = 20.0, allow_private: bool = False) -> None:
        """timeout_s: of a visit, with all redirects and the reading."""
        self._timeout_s, self._allow_private = timeout_s, allow_private

    def __call__(self, url: str) -> str:
        """Read a web page. Answers with its text."""
        end = time.monotonic() + self._timeout_s
        page = asyncio.run(self._fetch(url))
        text = _decoded(page)
        if page.kind == "text/html":
            text = _text_of(text, max(end - time.monotonic(), 0.0))
        return excerpt(text, SHOWN) + ("" if page.whole else f"\n[only the first {READ} bytes of the page were read]")

    async def _fetch(self, url: str) -> Page:
        # Without the environment's proxies: they would resolve the name again.
        client = httpx.AsyncClient(trust_env=False, timeout=self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s), client:
                return await self._follow(client, httpx.URL(url))
        except TimeoutError:
            raise VisitRefused(f"{url} did not answer within {self._timeout_s:g} s") from None
        except httpx.InvalidURL as error:
            raise VisitRefused(f"{url!r} is no address of a page: {error}") from None
        except httpx.HTTPError as error:
            raise VisitRefused(f"{url} cannot be read: {type(error).__name__}") from None

    async def _follow(self, client: httpx.AsyncClient, url: httpx.URL) -> Page:
        for _ in range(REDIRECTS + 1):
            response = await client.send(await self._request(client, url), stream=True)
            try:
                if not response.has_redirect_location:
                    return await _page(response)
                url = url.join(response.headers["location"])
            finally:
                await response.aclose()
        raise VisitRefused(f"more than {REDIRECTS} redirects")

    async def _request(self, client: httpx.AsyncClient, url: httpx.URL) -> httpx.Request:
        """To the address that was checked, whatever the name means a moment later; for TLS it is still the name."""
        if url.scheme not in ("http", "https") or not url.host:
            raise VisitRefused(f"{str(url)!r} is no http or https address")
        if url.userinfo:
            raise VisitRefused("an address with a user name or password is not visited")
        address = await self._resolved(url)
        return client.build_request(
            "GET",
            url.copy_with(host=address),
            headers=HEADERS | {"Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )

    async def _resolved(self, url: httpx.URL) -> str:
        host = url.raw_host.decode("ascii").strip("[]")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, url.port or url.scheme, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise VisitRefused(f"there is no host {host!r}") from None
        addresses = [str(address[0]) for *_, address in found]
        if not self._allow_private and not all(map(_public, addresses)):
            raise VisitRefused(f"{host} is on a private network, which is not visited")
        return min(addresses, key=lambda address: ":" in address)  # IPv4 first: not every machine has IPv6


def _public(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return ip.is_global and ip in UNICAST and not any(ip in tunnel for tunnel in TUNNELS)
        ip = ip.ipv4_mapped
    return ip.is_global and not ip.is_multicast


async def _page(response: httpx.Response) -> Page:
    if response.status_code != 200:
        raise VisitRefused(f"the server answers HTTP {response.status_code}")
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in TYPES:
        raise VisitRefused(f"the page is {kind or 'of no known type'}; only {', '.join(TYPES)} are read")
    data = bytearray()
    async for part in response.aiter_raw():
        data += part
        if len(data) > READ:
            break
    plain = _unpacked(bytes(data), response.headers.get("content-encoding", "identity"))
    return Page(plain[:READ], kind, response.charset_encoding or "utf-8", max(len(data), len(plain)) <= READ)


def _unpacked(data: bytes, encoding: str) -> bytes:
    if encoding == "identity":
        return data
    if encoding != "gzip":
        raise VisitRefused(f"the page is packed as {encoding!r}; only gzip is read")
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, READ + 1)
    except zlib.error:
        raise VisitRefused("the page is damaged") from None


def _decoded(page: Page) -> str:
    try:
        return page.data.decode(page.charset, "replace")
    except (LookupError, UnicodeError):
        return page.data.decode("utf-8", "replace")


def _text_of(html: str, timeout_s: float) -> str:
    try:
        read = subprocess.run(
            [sys.executable, "-I", str(READER)],
            input=html.encode("utf-8", "replace"),
            capture_output=True,
            env={"LANG": "C.UTF-8"},
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise VisitRefused("the page takes too long to read") from None
    if read.returncode != 0:
        raise VisitRefused("the page cannot be read as HTML")
    return read.stdout.decode()
