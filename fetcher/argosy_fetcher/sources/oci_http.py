"""HTTP as registries and token servers speak it: timeouts, bounded documents, and failures as the fetcher's errors.

Owns what a status, an error code and a broken connection mean. Must not know authentication and manifests. Invariant: a
message names hosts, statuses and codes, never a URL (it may be signed), a header or a body.

    TransientError    429 and TOOMANYREQUESTS, 408, 5xx, timeouts, cut connections
    AccessDenied      401, 403, DENIED, UNAUTHORIZED
    UnknownHost       a host that does not exist
    ModelNotFound     404, NAME_UNKNOWN, MANIFEST_UNKNOWN
    InvalidSource     NAME_INVALID, TAG_INVALID, DIGEST_INVALID
    UnsupportedModel  406, 415, a document that is too large
    FetchError        everything else: TLS, other statuses
"""

from __future__ import annotations

import email.utils
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Final

import httpx
from msgspec import Meta, Struct

from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelNotFound,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.sources.documents import MalformedDocument, decode_document
from argosy_fetcher.sources.oci_reference import PLAIN_HTTP_ENV
from argosy_fetcher.sources.tls import trusted
from argosy_fetcher.sources.unknown_host import is_unknown_host, unknown_host

CONNECT_TIMEOUT: Final = 10.0
SILENCE_TIMEOUT: Final = 30.0
"""Longest wait for the next bytes."""
DOCUMENT_TIMEOUT: Final = 60.0
"""For all bytes of a document, so that a server cannot hold a fetch with single bytes."""
MAX_CONNECTIONS: Final = 16
MAX_ERROR_BYTES: Final = 64 << 10
MAX_RETRY_AFTER: Final = 3600.0

_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL's reasons if the other side speaks something else."""
_CODE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


class RegistryError(Struct, frozen=True):
    code: str = ""


class RegistryErrors(Struct, frozen=True):
    """The body of an error response (OCI distribution specification)."""

    errors: Annotated[tuple[RegistryError, ...], Meta(max_length=64)] = ()


def http_client(values: Mapping[str, str]) -> httpx.Client:
    """Return a client for several threads. It follows no redirects: where credentials may go is the caller's to say.

    Args:
        values: SSL_CERT_FILE names the authorities that are trusted.
    """
    return httpx.Client(
        timeout=httpx.Timeout(SILENCE_TIMEOUT, connect=CONNECT_TIMEOUT),
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS),
        headers={"User-Agent": "argosy-fetcher", "Accept-Encoding": "identity"},
        follow_redirects=False,
        verify=trusted(values),
    )


@contextmanager
def translated(subject: str) -> Iterator[None]:
    """Raise the fetcher's errors for httpx's.

    Args:
        subject: what is fetched, for messages.
    """
    try:
        yield
    except httpx.InvalidURL:
        raise FetchError(f"{subject}: the registry gave a malformed URL") from None
    except httpx.HTTPError as error:
        if "in location header" in str(error):  # httpx reads it even if it is not to follow it
            raise FetchError(f"{subject}: the registry redirects to a malformed URL") from None
        raise _translation(subject, error) from error


def _translation(subject: str, error: httpx.HTTPError) -> FetchError | TransientError:
    host = _host(error)
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return FetchError(
                f"{subject}: the certificate of {host} is not trusted ({cause.verify_message}); "
                "set SSL_CERT_FILE to a bundle with its authority"
            )
        if isinstance(cause, ssl.SSLError) and getattr(cause, "reason", "") in _NO_TLS:
            return FetchError(
                f"{subject}: {host} does not speak TLS; if its network is trusted, set {PLAIN_HTTP_ENV}={host}"
            )
    if is_unknown_host(error):
        return unknown_host(subject, host, "its name")
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
        return FetchError(f"{subject}: the request to {host} cannot be made ({type(error).__name__})")
    return TransientError(f"{subject}: no answer from {host} ({type(error).__name__}: {error})")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


def _host(error: httpx.HTTPError) -> str:
    try:
        return error.request.url.netloc.decode("ascii", "replace")
    except RuntimeError:  # an error before there was a request
        return "the registry"


def read_document(
    response: httpx.Response, limit: int, subject: str, clock: Callable[[], float] = time.monotonic
) -> bytes:
    """Read a whole body of at most `limit` bytes.

    Raises:
        UnsupportedModel: it is larger.
        TransientError: it did not arrive in time, or the connection broke.
    """
    too_large = UnsupportedModel(f"{subject}: the registry's answer is larger than {limit} bytes")
    announced = response.headers.get("Content-Length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large
    deadline = clock() + DOCUMENT_TIMEOUT
    content = bytearray()
    with translated(subject):
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > limit:
                raise too_large
            if clock() > deadline:
                raise TransientError(f"{subject}: an answer took longer than {DOCUMENT_TIMEOUT:.0f} s")
    return bytes(content)


def discard(response: httpx.Response, subject: str) -> None:
    """Read what is left of a short body, so that its connection can be used again."""
    try:
        read_document(response, MAX_ERROR_BYTES, subject)
    except (UnsupportedModel, TransientError):
        pass
    finally:
        response.close()


def error_of(
    response: httpx.Response, subject: str, remedy: Callable[[], str]
) -> FetchError | TransientError:
    """Return the error that a response stands for.

    Args:
        response: not read yet.
        remedy: what to do if access is denied.
    """
    status, code = response.status_code, _error_code(response, subject)
    said = f"{status} {code}".strip()
    host = response.url.netloc.decode("ascii", "replace")
    if status == 429 or code == "TOOMANYREQUESTS":
        return TransientError(
            f"{subject}: {host} limits the rate of requests ({said}); credentials often raise the limit",
            retry_after(response),
        )
    if status >= 500 or status == 408:
        return TransientError(f"{subject}: {host} failed ({said})", retry_after(response))
    if status in (401, 403) or code in ("UNAUTHORIZED", "DENIED"):
        return AccessDenied(
            f"{subject}: {host} denies access ({said}), or the repository does not exist; {remedy()}"
        )
    if code == "NAME_UNKNOWN":
        return ModelNotFound(f"{subject}: {host} has no such repository ({said})")
    if code == "MANIFEST_UNKNOWN":
        return ModelNotFound(f"{subject}: the repository has no such tag or digest ({said})")
    if status == 404:
        return ModelNotFound(
            f"{subject}: {host} has no such repository, tag or digest, or is no registry ({said})"
        )
    if code in ("NAME_INVALID", "TAG_INVALID", "DIGEST_INVALID"):
        return InvalidSource(f"{subject}: {host} refuses the name ({said})")
    if status in (406, 415) or code == "UNSUPPORTED":
        return UnsupportedModel(f"{subject}: {host} has it in no form that is supported ({said})")
    return FetchError(f"{subject}: {host} answered unexpectedly ({said})")


def _error_code(response: httpx.Response, subject: str) -> str:
    """Return the first error code in a body; empty if there is none."""
    try:
        content = read_document(response, MAX_ERROR_BYTES, subject)
        errors = decode_document(content, RegistryErrors).errors
    except (UnsupportedModel, TransientError, MalformedDocument):
        return ""
    return next((error.code for error in errors if _CODE.fullmatch(error.code)), "")


def retry_after(response: httpx.Response, now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds of a Retry-After header, which may be a date, within bounds; None if there is none."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), MAX_RETRY_AFTER)
    try:
        date = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return min(max(date - now(), 0.0), MAX_RETRY_AFTER)
