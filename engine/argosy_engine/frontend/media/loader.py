"""MediaLoader: gets the bytes of an image from a URL of a chat: `data:`, `http(s):` or `file:`.

A URL is chosen by a client, so it may point at anything. Data URLs are always taken; the other two are off unless flags
allow them.

- `http(s)`: only to hosts of `--allowed-media-domains`, each redirect included. The host is resolved once, refused if
  any of its addresses is not a public one, and the connection is made to an address that was checked, so that a name
  cannot change its address in between (DNS rebinding). Size and time are bounded; nothing of the client's request is
  sent along.
- `file`: only regular files below `--allowed-local-media-path`, where the opened file is, whatever links led to it.

The format is what the content says, not the name: PNG, JPEG, WebP or GIF. Content that is none of them, or another one
than its type declares, is refused. Nothing is decoded here (`worker`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

import httptools

from argosy_engine.errors import InvalidRequest
from argosy_engine.fair_shares import RoundRobinQueue, TenantShares

MAX_IMAGE_BYTES: Final = 32 << 20
"""Of one image as it is sent. A photograph of 50 megapixels has half of it."""
FETCH_TIMEOUT_S: Final = 10.0
"""For one image, its redirects included."""
MAX_REDIRECTS: Final = 4
MAX_FETCHES: Final = 16
"""Connections of one API process at the same time."""
MAX_URL_CHARS: Final = 4096
"""Of a URL without data."""
_INLINE_CHARS: Final = 256 << 10
"""Of a data URL that is decoded on the event loop, if it is plain base64, as nearly all are."""
_INLINE_LENIENT_CHARS: Final = 8 << 10
"""Of one in another form, which takes thirty times as long."""
_MAX_HEADER_BYTES: Final = 64 << 10
_READ_BYTES: Final = 64 << 10
_DATA_URL = re.compile(r"data:(?P<type>[^,;]{0,128})(?P<parameters>(?:;[^,;]{0,128}){0,4}),", re.IGNORECASE)
_PLAIN_BASE64: Final = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_ALIASES: Final = {"jpg": "jpeg", "pjpeg": "jpeg", "x-png": "png", "apng": "png"}
_FORMATS: Final = ("png", "jpeg", "webp", "gif")
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))
_EMBEDDING_NETWORKS: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""Networks of IPv6 whose addresses stand for addresses of IPv4."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Media(NamedTuple):
    """An image as it was sent."""

    data: bytes
    format: str
    """`png`, `jpeg`, `webp` or `gif`."""


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public Internet, and so to nobody's private network."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or any(address in network for network in _EMBEDDING_NETWORKS):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def format_of(data: bytes) -> str | None:
    """Return the format of an image by its first bytes; None if it is none that is read."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    return None


def checked(data: bytes, declared: str, where: str) -> Media:
    """Return an image whose content is what its type declares.

    Args:
        declared: media type, such as `image/png`; empty or none of an image: the content tells.
        where: the field that has it, for errors.

    Raises:
        InvalidRequest: it is no image of a format that is read, or of another one than is declared.
    """
    found = format_of(data)
    if found is None:
        what = "is empty" if not data else "is no PNG, JPEG, WebP or GIF"
        raise InvalidRequest(f"{where}: the image {what}", param=where)
    kind, _, subtype = declared.strip().lower().partition("/")
    subtype = _ALIASES.get(subtype, subtype)
    if kind == "image" and subtype != found:
        raise InvalidRequest(
            f"{where}: the image is declared as {declared[:64]!r}, but its content is {found}; declare image/{found}",
            param=where,
        )
    return Media(data, found)


class _Places:
    """Places for connections, in which tenants take turns; each leaves some to others (`TenantShares`). One event loop
    uses it.

    Args:
        count: of them.
    """

    def __init__(self, count: int) -> None:
        self._held = TenantShares(count)
        self._waiting: RoundRobinQueue[asyncio.Future[None]] = RoundRobinQueue()

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push(tenant, turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # passed over since
                    self._waiting.remove(tenant, turn)
            else:
                self._take_back(tenant)
            raise
        try:
            yield
        finally:
            self._take_back(tenant)

    def _take_back(self, tenant: str) -> None:
        self._held.remove(tenant, 1)
        self._give()

    def _give(self) -> None:
        while not self._held.is_full(1):
            firsts = self._waiting.firsts()
            found = next((first for first in firsts if not self._held.exceeds_share(first[0], 1)), None)
            if found is None:
                return
            tenant, turn = found
            self._waiting.pop(tenant)
            if not turn.cancelled():
                self._held.add(tenant, 1)
                turn.set_result(None)


class MediaLoader:
    """
    Args:
        allowed_domains: hosts from which images are fetched, as `HOST` or `HOST:PORT`; empty: from none.
        allowed_path: folder below which files are read; None: none are.
        permits: whether a connection may be made to an address.
        timeout_s: for fetching one image.
        certificates: certificate authorities of hosts, in place of the system's.
    """

    def __init__(
        self,
        allowed_domains: Sequence[str] = (),
        allowed_path: str | None = None,
        *,
        permits: Callable[[Address], bool] = is_public,
        timeout_s: float = FETCH_TIMEOUT_S,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        self._domains = frozenset(domain.lower().rstrip(".") for domain in allowed_domains)
        self._root = None if allowed_path is None else Path(allowed_path).expanduser().resolve()
        self._permits = permits
        self._timeout_s = timeout_s
        self._ssl = certificates
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetches = _Places(MAX_FETCHES)

    async def load(self, url: str, where: str, tenant: str = "") -> Media:
        """Get an image.

        Args:
            where: the field that has the URL, for errors.
            tenant: the request's tenant (`headers.TENANT`).

        Raises:
            InvalidRequest: the URL is refused, cannot be read in time, or has no image that is read.
        """
        scheme = url[: url.find(":")].lower() if ":" in url[:16] else ""
        match scheme:
            case "data":
                if len(url) <= _INLINE_LENIENT_CHARS or (
                    len(url) <= _INLINE_CHARS and _PLAIN_BASE64.fullmatch(url, url.find(",") + 1)
                ):
                    return decode_data_url(url, where)
                return await asyncio.to_thread(decode_data_url, url, where)
            case "http" | "https":
                if self._loop is not (loop := asyncio.get_running_loop()):  # offline, each call has one
                    self._loop, self._fetches = loop, _Places(MAX_FETCHES)
                async with self._fetches.place(tenant):
                    return await self._fetch(url, where)
            case "file":
                return await asyncio.to_thread(self._read_file, url, where)
        raise InvalidRequest(
            f"{where} must be a URL that begins with data:, https:, http: or file:, not {url[:32]!r}",
            param=where,
        )

    def _read_file(self, url: str, where: str) -> Media:
        if self._root is None:
            raise InvalidRequest(
                f"{where}: files are read only by an engine that was started with --allowed-local-media-path; send the "
                "image as a data URL",
                param=where,
            )
        refused = InvalidRequest(
            f"{where}: the file cannot be read, or is not below --allowed-local-media-path", param=where
        )
        try:
            parts = urlsplit(url[:MAX_URL_CHARS])
            path = unquote(parts.path)
            if parts.netloc not in ("", "localhost") or len(url) > MAX_URL_CHARS:
                raise refused
            # Opening alone has effects: on pipes whose writers wait for a reader, and on devices.
            found = Path(os.path.realpath(path, strict=True))
            if not found.is_relative_to(self._root) or not found.is_file():
                raise refused
            with open(path, "rb", buffering=0, opener=_open_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refused
                if not _place_of(file.fileno(), path).is_relative_to(self._root):
                    raise refused
                data = _read_at_most(file, MAX_IMAGE_BYTES + 1)
        except (OSError, ValueError):
            raise refused from None
        if len(data) > MAX_IMAGE_BYTES:
            raise _too_large(where)
        return checked(data, "", where)

    async def _fetch(self, url: str, where: str) -> Media:
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(1 + MAX_REDIRECTS):
                    response = await self._get(url, where)
                    if response.status not in _REDIRECTS:
                        break
                    try:
                        url = urljoin(url, response.headers.get("location", ""))
                    except ValueError:
                        url = ""  # which `_target` refuses
        except TimeoutError:
            raise InvalidRequest(
                f"{where}: the image did not arrive within {self._timeout_s:g} s", param=where
            ) from None
        except (OSError, EOFError, httptools.HttpParserError) as error:
            what = type(error).__name__ if isinstance(error, ssl.SSLError) else "the connection failed"
            raise InvalidRequest(f"{where}: the image cannot be fetched: {what}", param=where) from None
        if response.status != 200:
            what = "too many redirects" if response.status in _REDIRECTS else f"status {response.status}"
            raise InvalidRequest(f"{where}: the image cannot be fetched: {what}", param=where)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest(
                f"{where}: the image's host compresses it without being asked to", param=where
            )
        return checked(
            bytes(response.body), response.headers.get("content-type", "").partition(";")[0], where
        )

    async def _get(self, url: str, where: str) -> _Response:
        """Send one request and read its response; the body of a redirect is not read."""
        host, port, is_encrypted, path = self._target(url, where)
        address = await self._resolved(host, port, where)
        if is_encrypted and self._ssl is None:
            self._ssl = ssl.create_default_context()
        context = self._ssl if is_encrypted else None
        reader, writer = await asyncio.open_connection(
            str(address), port, ssl=context, server_hostname=host if is_encrypted else None, limit=_READ_BYTES
        )
        try:
            shown = f"[{host}]" if ":" in host else host
            named = shown if port == (443 if is_encrypted else 80) else f"{shown}:{port}"
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {named}\r\nAccept: image/*\r\nAccept-Encoding: identity\r\n"
                "User-Agent: argosy\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            return await _read_response(reader, where)
        finally:
            writer.transport.abort()

    def _target(self, url: str, where: str) -> tuple[str, int, bool, str]:
        """Return host, port, whether it is HTTPS, and path with query."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            path.encode("ascii")
            is_plain = not re.search(r"[\x00-\x20\x7f]", path) and len(url) <= MAX_URL_CHARS
        except (ValueError, UnicodeError):
            host, port, path, is_plain = "", None, "", False
        if not host or not is_plain or not host.isascii() or parts.scheme not in ("http", "https"):
            raise InvalidRequest(
                f"{where}: the URL is malformed, or longer than {MAX_URL_CHARS} characters; write other characters "
                "than ASCII as %XX, and the host in Punycode",
                param=where,
            )
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest(
                f"{where}: a URL of an image must not have a user or a password", param=where
            )
        is_encrypted = parts.scheme == "https"
        usual = 443 if is_encrypted else 80
        named = f"[{host}]" if ":" in host else host
        if f"{named}:{port or usual}" not in self._domains and (
            named not in self._domains or (port or usual) not in (80, 443)
        ):
            raise InvalidRequest(
                f"{where}: images are not fetched from {named[:128]}; send the image as a data URL, or start the "
                "engine with the host in --allowed-media-domains",
                param=where,
            )
        return host, port or usual, is_encrypted, path

    async def _resolved(self, host: str, port: int, where: str) -> Address:
        """Return an address of a host, all of whose addresses are public."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [ipaddress.ip_address(each[4][0]) for each in found]
        except (OSError, UnicodeError, ValueError):
            addresses = []
        if not addresses:
            raise InvalidRequest(f"{where}: the image's host has no address", param=where)
        if not all(map(self._permits, addresses)):
            raise InvalidRequest(
                f"{where}: the image's host is in a private network, from which images are not fetched; send the image "
                "as a data URL",
                param=where,
            )
        return addresses[0]


def decode_data_url(url: str, where: str) -> Media:
    """Decode a data URL in base64 (RFC 2397).

    Raises:
        InvalidRequest: malformed, too large, or no image that is read.
    """
    head = _DATA_URL.match(url, 0, 1024)
    if head is None or "base64" not in head["parameters"].lower().split(";"):
        raise InvalidRequest(
            f"{where} must have the form data:image/png;base64,DATA, not {url[:32]!r}", param=where
        )
    if (len(url) - head.end()) // 4 * 3 > MAX_IMAGE_BYTES + 2:
        raise _too_large(where)
    try:
        data = binascii.a2b_base64(url[head.end() :], strict_mode=True)
    except (binascii.Error, ValueError):
        data = _lenient(url[head.end() :], where)
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(where)
    return checked(data, head["type"], where)


def _lenient(text: str, where: str) -> bytes:
    """Decode base64 with line ends, without padding, or of URLs' alphabet, as clients write it."""
    text = "".join(unquote(text).split()).rstrip("=")
    try:
        return base64.b64decode(
            text + "=" * (-len(text) % 4),
            altchars=b"-_" if "-" in text or "_" in text else None,
            validate=True,
        )
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{where} is not valid base64", param=where) from None


def _too_large(where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: the image has more than {MAX_IMAGE_BYTES >> 20} MiB; send a smaller one", param=where
    )


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file, and no pipe that waits for its other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _place_of(descriptor: int, path: str) -> Path:
    """Return where an open file is, without links."""
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    return Path(path).resolve(strict=True)


def _read_at_most(file: Any, size: int) -> bytes:
    parts = []
    while size > 0 and (part := file.read(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Response:
    """A response of HTTP/1.1 while it arrives (the callbacks of `httptools.HttpResponseParser`)."""

    def __init__(self, where: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_complete = self.has_headers = False
        self._where = where
        self._num_header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value)
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    def check(self, num_bytes: int) -> None:
        """
        Args:
            num_bytes: received so far.

        Raises:
            InvalidRequest: too many.
        """
        if max(self._num_header_bytes, 0 if self.has_headers else num_bytes) > _MAX_HEADER_BYTES:
            raise InvalidRequest(f"{self._where}: the image's host sends too many headers", param=self._where)
        if len(self.body) > MAX_IMAGE_BYTES:
            raise _too_large(self._where)


async def _read_response(reader: asyncio.StreamReader, where: str) -> _Response:
    response = _Response(where)
    parser = httptools.HttpResponseParser(response)
    num_bytes = 0
    while not response.is_complete:
        data = await reader.read(_READ_BYTES)
        if not data:
            if response.has_headers and not {"content-length", "transfer-encoding"} & set(response.headers):
                return response  # ended by the connection's end
            raise EOFError
        num_bytes += len(data)
        parser.feed_data(data)
        response.check(num_bytes)
        if response.has_headers:
            response.status = parser.get_status_code()
            length = response.headers.get("content-length", "")
            if length.isdigit() and int(length) > MAX_IMAGE_BYTES:
                raise _too_large(where)
            if response.status != 200:
                return response
    return response
