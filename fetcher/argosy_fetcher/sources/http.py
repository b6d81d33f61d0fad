"""What sources share over HTTP: trusted authorities, failures of connections, and documents that are read whole.

Documents, such as lists of files, are bounded in size and time, and decoded against a type. Invariant: the text of a
decoding error names places and types, never values.
"""

from __future__ import annotations

import email.utils
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Final, TypeVar

import httpx
import msgspec

from argosy_fetcher.errors import FetchError, InvalidSource, TransientError, UnknownHost, UnsupportedModel
from argosy_fetcher.source import MAX_FILES, Digest, check_path

MAX_DOCUMENT_S: Final = 120.0
"""For all bytes of a document, so that a server cannot hold a fetch with single bytes."""

_NO_NAME: Final = re.compile(
    r"Name or service not known|nodename nor servname provided|No such host is known"
)
"""What C libraries and Windows say, in texts of clients that are not Python's."""
SUMS_FILE = "SHA256SUMS"
MAX_SUMS_BYTES = 4 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")

T = TypeVar("T")


class MalformedDocument(ValueError):
    """The bytes are no JSON, or not of the type."""


def read_bounded(
    chunks: Iterable[bytes], limit: int, what: str, clock: Callable[[], float] = time.monotonic
) -> bytes:
    """Return a body of at most `limit` bytes.

    Args:
        what: names the document in errors.

    Raises:
        UnsupportedModel: it is larger.
        TransientError: it does not arrive in time.
    """
    deadline = clock() + MAX_DOCUMENT_S
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > limit:
            raise UnsupportedModel(f"{what} has more than {limit} bytes, which is the limit")
        if clock() > deadline:
            raise TransientError(f"{what} took longer than {MAX_DOCUMENT_S:.0f} s")
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


def cut(chunks: Iterable[bytes], skipped: int, count: int) -> Iterator[memoryview]:
    """Yield `count` bytes of a body after the first `skipped`, or fewer if it ends.

    A body that ends there is read to its end, because only then its connection serves the next request.
    """
    for chunk in chunks:
        if not count:
            return
        part = memoryview(chunk)[skipped : skipped + count]
        skipped = max(0, skipped - len(chunk))
        count -= len(part)
        if part:
            yield part


def origin(url: httpx.URL) -> tuple[str, str, int | None]:
    """Return scheme, host and port, which is None if it is the scheme's own."""
    return url.scheme, url.host, url.port


def is_transient(status: int) -> bool:
    """Whether another attempt may cure a status. Some from 500 on are of proxies in front of a server, such as
    Cloudflare's 520 to 530."""
    return status in (408, 425, 429) or status >= 500


def retry_after_s(value: str, now: float) -> float | None:
    """Return the seconds of a `Retry-After` header, which is a number or a date; None if it is neither.

    Args:
        now: seconds since the epoch.
    """
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
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


def untrusted(where: str, host: str) -> FetchError:
    """Return the error for a server whose certificate is not trusted."""
    return FetchError(
        f"{where}: the certificate of {host} is not trusted; name a file with its authority's certificate in "
        "SSL_CERT_FILE"
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
