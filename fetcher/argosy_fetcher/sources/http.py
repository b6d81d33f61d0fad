"""What sources share over HTTP: one client, on httpx, with redirects, ranges and failures; and documents read whole.

Owns where requests and credentials may go, what a range of a file is, how long to wait where a server says so, and what
broken connections mean. A source's subclass of `SourceClient` says what its refusals mean. Invariants: a credential
goes to the source's own scheme, host and port only, never along a redirect to another; redirects are followed to web
servers only, and never from HTTPS to HTTP; bodies that nobody wants are read up to a bound, so that their connection
can be used again; documents, such as lists of files, are bounded in size and time, and decoded against a type; no
message has a URL, whose query may be a signature; the text of a decoding error names places and types, never values.

httpx's own `follow_redirects` and `auth` are not used: both read the whole body of an answer that they go on from,
however long it is, and keep no bound of time.
"""

from __future__ import annotations

import email.utils
import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import Final, TypeVar

import httpx
import msgspec

from argosy_fetcher.errors import (
    FetchError,
    InvalidSource,
    SourceChanged,
    TransientError,
    UnknownHost,
    UnsupportedModel,
)
from argosy_fetcher.source import MAX_FILES, Chunk, Digest, check_path
from argosy_protocol import __version__

MAX_DOCUMENT_S: Final = 120.0
"""For all bytes of a document, so that a server cannot hold a fetch with single bytes."""
MAX_REDIRECTS: Final = 5
MAX_LOCATION_CHARACTERS: Final = 8192
MAX_RETRY_AFTER_S: Final = 3600.0
MAX_DISCARDED_BYTES: Final = 64 << 10
MAX_DISCARD_S: Final = 10.0
TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0, pool=None)
"""Seconds of silence, not of a whole response."""
_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=16)

_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,20})-(\d{1,20})|\*)/(\d{1,20}|\*)", re.ASCII)
_RATE_LIMIT: Final = re.compile(r'"\w+"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})', re.ASCII)
"""The Hugging Face hub's header, after draft-ietf-httpapi-ratelimit-headers: nothing remains for so many seconds."""
_NO_NAME: Final = re.compile(
    r"Name or service not known|nodename nor servname provided|No such host is known"
)
"""What C libraries and Windows say, in texts of clients that are not Python's."""
SUMS_FILE = "SHA256SUMS"
MAX_SUMS_BYTES = 4 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")

T = TypeVar("T")


class SourceClient:
    """GET requests to one server and to where it redirects. Thread-safe.

    Args:
        server: any URL of the source's server.
        trust_env: whether proxies of the environment are used.

    Raises:
        InvalidSource: the file of trusted certificates is unusable.
    """

    FAULT: type[FetchError] | type[TransientError] = FetchError
    """Raised for redirects without end, compressed files, and other ranges than were asked for."""
    IS_EXACT = False
    """Whether an answer with more than the range that was asked for is refused, not cut."""
    ADVICE = ""
    """The end of messages about redirects that are not followed."""
    NAMED_BY = "the URL"
    """What names the server's host, for messages."""

    def __init__(self, server: httpx.URL, credentials: Mapping[str, str], *, trust_env: bool = True) -> None:
        # They log every address and redirect, and signed addresses are credentials.
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.server = server
        self._sends_ranges: bool | None = None
        self.authorization = ""
        """Value of the header for the server's own origin; none is sent if it is empty."""
        self.http = httpx.Client(
            verify=trusted(credentials),
            trust_env=trust_env,
            headers={
                "User-Agent": f"argosy-fetcher/{__version__}",
                "Accept": "*/*",
                "Accept-Encoding": "identity",
            },
            timeout=TIMEOUT,
            limits=_LIMITS,
        )

    def close(self) -> None:
        self.http.close()

    def is_own(self, url: httpx.URL) -> bool:
        """Whether a URL has the server's scheme, host and port."""
        return (url.scheme, url.host, url.port) == (self.server.scheme, self.server.host, self.server.port)

    def may_be_plain(self, url: httpx.URL, target: httpx.URL) -> bool:
        """Whether a redirect from `url` to an unencrypted `target` is followed."""
        return False

    def get(
        self,
        url: httpx.URL,
        where: str,
        headers: Mapping[str, str],
        on_answer: Callable[[httpx.Response], None] = lambda response: None,
    ) -> httpx.Response:
        """Return a response of any status but a redirect's, whose body was not read yet. The caller closes it, or reads
        it by `chunks`.

        Args:
            where: names the model and the file in errors.
            on_answer: sees each answer, redirects included, and may raise.

        Raises:
            FetchError, TransientError: no answer, or a redirect that is not followed.
        """
        for _ in range(MAX_REDIRECTS + 1):
            request = self.http.build_request("GET", url, headers=headers)
            if self.authorization and self.is_own(url):
                request.headers["Authorization"] = self.authorization
            response = self.send(request, where)
            try:
                on_answer(response)
            except BaseException:
                response.close()
                raise
            if not response.has_redirect_location:
                return response
            self.discard(response)
            url = self._target(response, where)
        raise self.FAULT(f"{where}: more than {MAX_REDIRECTS} redirects")

    def send(self, request: httpx.Request, where: str) -> httpx.Response:
        """Return the response to one request, whose body was not read yet."""
        with self.translated(where):
            return self.http.send(request, stream=True, auth=None)

    def chunks(self, response: httpx.Response, where: str) -> Generator[bytes, None, None]:
        """Yield a response's body as it comes, and close the response.

        Raises:
            TransientError: the connection was cut.
        """
        try:
            with self.translated(where):
                yield from response.iter_raw()
        finally:
            response.close()

    def document(
        self,
        response: httpx.Response,
        limit: int,
        where: str,
        max_s: float = MAX_DOCUMENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> bytes:
        """Read a whole body (`read_bounded`), and close the response."""
        try:
            return read_bounded(self.chunks(response, where), limit, where, clock, max_s)
        finally:
            response.close()

    def discard(self, response: httpx.Response) -> None:
        """Close a response; read it before if it is short, so that its connection can be used again."""
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_DISCARDED_BYTES:
            response.close()
            return
        with suppress(FetchError, TransientError):
            self.document(response, MAX_DISCARDED_BYTES, "", MAX_DISCARD_S)

    def part(self, response: httpx.Response, size: int, start: int, stop: int, where: str) -> Iterator[Chunk]:
        """Yield the bytes [start, stop) of a file of `size` bytes, of a response with status 200 or 206, and close it.
        Of a server that ignores ranges what comes before is skipped, and what comes after not waited for.

        Raises:
            SourceChanged: the file has another size.
            FetchError, TransientError: the response is compressed or of another range, or was cut.
        """
        is_whole = response.status_code == 200
        skipped, left = start if is_whole else 0, stop - start
        try:
            self.check_encoding(response, where)
            first, last, total = content_range(response)
            if not is_whole and (first != start or (self.IS_EXACT and last >= stop)):
                raise self.FAULT(
                    f"{where}: {response.url.host} answers with another range than was asked for"
                )
            if total is not None and total != size:
                raise SourceChanged(
                    f"{where} has changed: {response.url.host} has {total} bytes instead of {size}; "
                    "fetch the model anew"
                )
        except BaseException:
            response.close()
            raise
        with closing(self.chunks(response, where)) as chunks:
            for chunk in chunks:
                if not left:
                    return
                part = memoryview(chunk)[skipped : skipped + left]
                skipped = max(0, skipped - len(chunk))
                left -= len(part)
                if part:
                    yield part
                if not left and is_whole:
                    return

    def sends_ranges(self, open_last_byte: Callable[[], httpx.Response]) -> bool:
        """Whether content begins at the byte that is asked for. Asks once: one host has all content of a source. If it
        does not answer, that is left to reads to find out.

        Args:
            open_last_byte: returns the response to a request for the last byte of a file.
        """
        if self._sends_ranges is None:
            self._sends_ranges = True
            with suppress(FetchError, TransientError):
                response = open_last_byte()
                self._sends_ranges = response.status_code != 200
                self.discard(response)
        return self._sends_ranges

    def check_encoding(self, response: httpx.Response, where: str) -> None:
        """Refuse content that is compressed for the transfer: its size is not the file's."""
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise self.FAULT(
                f"{where}: {response.url.host} compresses the file ({encoding[:20]}) although it was asked not to"
            )

    @contextmanager
    def translated(self, where: str) -> Iterator[None]:
        """Raise the fetcher's errors for httpx's."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.failure(error, where) from error

    def failure(self, error: httpx.HTTPError | httpx.InvalidURL, where: str) -> FetchError | TransientError:
        """Return the error for a request that got no answer, or for an answer that was cut."""
        if isinstance(error, httpx.InvalidURL):
            return FetchError(f"{where}: the server gave a malformed URL")
        if "in location header" in str(error):  # httpx reads it even if it is not to follow it
            return FetchError(f"{where}: the server redirects to something that is not a URL")
        url = request_url(error)
        host = url.netloc.decode("ascii", "replace") if url else "the server"
        if url and is_untrusted(error):
            return untrusted(where, url.host, error)
        if is_unknown_host(error):
            return unknown_host(where, host, self.NAMED_BY)
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
            return FetchError(f"{where}: the request to {host} cannot be sent ({type(error).__name__})")
        return TransientError(f"{where}: no answer from {host}, or it was cut ({said})")

    def _target(self, response: httpx.Response, where: str) -> httpx.URL:
        location = response.headers["location"]
        try:
            target = response.url.join(location[: MAX_LOCATION_CHARACTERS + 1])
        except (httpx.InvalidURL, ValueError):
            raise FetchError(f"{where}: the server redirects to something that is not a URL") from None
        is_web = target.scheme in ("http", "https") and target.host and not target.userinfo
        if not location or not is_web or len(location) > MAX_LOCATION_CHARACTERS:
            raise FetchError(
                f"{where}: the server redirects to a URL that is not followed: it leads to no web server, has a user "
                f"name in it, or is too long{self.ADVICE}"
            )
        if target.scheme == "http" and not self.may_be_plain(response.url, target):
            raise FetchError(
                f"{where}: the server redirects to {target.host} without encryption{self.ADVICE}"
            )
        return target


def content_range(response: httpx.Response) -> tuple[int, int, int | None]:
    """Return the first and last byte of a response's range, -1 for what it does not say, and the size of the whole file
    if it says so."""
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        return 0, -1, int(length) if re.fullmatch(r"[0-9]{1,20}", length) else None
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None:
        return -1, -1, None
    return int(found[1] or -1), int(found[2] or -1), None if found[3] == "*" else int(found[3])


def request_url(error: httpx.HTTPError) -> httpx.URL | None:
    """Return where a request went; None for an error before there was one."""
    try:
        return error.request.url
    except RuntimeError:
        return None


class MalformedDocument(ValueError):
    """The bytes are no JSON, or not of the type."""


def read_bounded(
    chunks: Iterable[bytes],
    limit: int,
    what: str,
    clock: Callable[[], float] = time.monotonic,
    max_s: float = MAX_DOCUMENT_S,
) -> bytes:
    """Return a body of at most `limit` bytes.

    Args:
        what: names the document in errors.

    Raises:
        UnsupportedModel: it is larger.
        TransientError: it does not arrive in time.
    """
    deadline = clock() + max_s
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > limit:
            raise UnsupportedModel(f"{what} has more than {limit} bytes, which is the limit")
        if clock() > deadline:
            raise TransientError(f"{what} took longer than {max_s:.0f} s")
    return bytes(content)


def decode_document(content: bytes, kind: type[T]) -> T:
    """Decode JSON.

    Raises:
        MalformedDocument: with the reason.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedDocument(str(error)) from None
    except RecursionError:
        raise MalformedDocument("nested too deeply") from None


def is_transient(status: int) -> bool:
    """Whether another attempt may cure a status. Some from 500 on are of proxies in front of a server, such as
    Cloudflare's 520 to 530."""
    return status in (408, 425, 429) or status >= 500


def retry_after_s(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Return how many seconds a server asks to wait, from `Retry-After` or the hub's `RateLimit`, within a bound; None
    if neither says so. A date counts from the server's own `Date` if there is one, so that clocks need not agree.

    Args:
        headers: with names in lower case, or of httpx.
        now: seconds since the epoch.
    """
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), MAX_RETRY_AFTER_S)
    until, date = _epoch(value), _epoch(headers.get("date", ""))
    if until is not None:
        return min(max(0.0, until - (now() if date is None else date)), MAX_RETRY_AFTER_S)
    found = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return min(float(found[1]), MAX_RETRY_AFTER_S) if found else None


def _epoch(date: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError, OSError):
        return None


def trusted(credentials: Mapping[str, str]) -> ssl.SSLContext:
    """Return what httpx takes as `verify`: the authorities in SSL_CERT_FILE, or its own, which clients share.

    Raises:
        InvalidSource: the file is unusable.
    """
    path = credentials.get("SSL_CERT_FILE")
    if not path:
        return _own_authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise InvalidSource(
            f"the certificates in SSL_CERT_FILE ({path}) cannot be used: {error.strerror}"
        ) from None


@cache
def _own_authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return httpx's context for these values of the environment, which it reads: parsing a hundred certificates takes
    longer than the rest of a client."""
    return httpx.create_ssl_context()


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised for, outermost first."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a request failed because of the server's certificate, which no other attempt cures."""
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes(error))


def untrusted(where: str, host: str, error: BaseException) -> FetchError:
    """Return the error for a server whose certificate is not trusted."""
    cause = next(found for found in causes(error) if isinstance(found, ssl.SSLCertVerificationError))
    return FetchError(
        f"{where}: the certificate of {host} is not trusted ({getattr(cause, 'verify_message', '')}); name a file with "
        "its authority's certificate in SSL_CERT_FILE"
    )


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether a connection failed because the host does not exist, which is not: no name server answered."""
    failed = next((cause for cause in causes(error) if isinstance(cause, socket.gaierror)), None)
    return failed is not None and failed.errno == socket.EAI_NONAME


def names_unknown_host(text: str) -> bool:
    """Whether a client's message is about a host that does not exist."""
    return _NO_NAME.search(text) is not None


def unknown_host(where: str, host: str, names: str) -> UnknownHost:
    """Return the error for a host that does not exist.

    Args:
        names: what names the host. A proxy's host, if one is set, is not told from it.
    """
    return UnknownHost(
        f"{where}: there is no host {host} in this network's DNS; check {names}, and the proxy's name if one is set"
    )


def parse_sha256sums(content: bytes, source: str) -> dict[str, Digest]:
    """Return path -> digest of what `sha256sum` prints, which web servers and buckets hold alike. Empty lines and lines
    that begin with `#` are skipped.

    Args:
        source: name of the model's source, for errors.

    Raises:
        UnsupportedModel: it is too long, has a line of another form, an unsafe path, or two digests for one path.
    """
    if len(content) > MAX_SUMS_BYTES:
        raise UnsupportedModel(f"{source}: {SUMS_FILE} has more than {MAX_SUMS_BYTES} bytes")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise UnsupportedModel(f"{source}: {SUMS_FILE} is not UTF-8") from None
    digests: dict[str, Digest] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise UnsupportedModel(
                f"{source}: line {number} of {SUMS_FILE} is not a digest and a path, as `sha256sum` prints them"
            )
        path = check_path(match[2].removeprefix("./"))
        digest = Digest("sha256", match[1].lower())
        if path == SUMS_FILE:
            continue
        if digests.setdefault(path, digest) != digest:
            raise UnsupportedModel(f"{source}: {SUMS_FILE} has two digests for {path!r}")
        if len(digests) > MAX_FILES:
            raise UnsupportedModel(f"{source}: {SUMS_FILE} names more than {MAX_FILES} files")
    return digests
