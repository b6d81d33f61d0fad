"""Which headers cross the router, the headers of its own errors, and request ids.

Owns: header rules of both directions. Must not know: routing.
Invariant: only the headers listed here cross the router. A client therefore cannot forge a router's headers towards an
engine of any make (`x-data-parallel-rank`), and an engine cannot forge the router's headers towards a client.
"""

from __future__ import annotations

import re
import secrets
from itertools import count
from typing import Final

from argosy_protocol.errors import ApiError
from argosy_router.http.messages import Headers, connection_options, render_headers

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_FORWARDED: Final = frozenset((b"accept", b"content-type", b"traceparent", b"tracestate", b"user-agent"))
"""Towards engines: what describes the body and the answer, trace context, and the user agent, for the engine's log. Not
`accept-encoding`: answers are read for usage and event boundaries."""
_RETURNED: Final = frozenset(
    (
        b"cache-control",
        b"content-encoding",
        b"content-language",
        b"content-type",
        b"date",
        b"openai-model",
        b"openai-processing-ms",
        b"openai-version",
        b"retry-after",
        b"retry-after-ms",
        b"x-accel-buffering",
        b"x-should-retry",
    )
)
"""Towards clients: what describes the body, and what OpenAI's SDKs and proxies in front of the router obey."""

_process: Final = secrets.token_hex(8).encode()
_numbers: Final = count(1)


def request_id(sent: bytes | None) -> bytes:
    """Return the client's id if it is safe to pass on, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return b"%b-%d" % (_process, next(_numbers))


def forwarded(headers: Headers) -> bytes:
    """Render a client's headers as an engine gets them."""
    return _only(headers, _FORWARDED)


def returned(headers: Headers) -> bytes:
    """Render an engine's headers as the client gets them."""
    return _only(headers, _RETURNED)


def error_headers(error: ApiError) -> bytes:
    """Render the headers of an error of our own; `x-should-retry` is what OpenAI's SDKs obey first."""
    lines = b"content-type: application/json\r\n"
    extra = error.headers()
    if extra:
        lines += render_headers([(name.encode(), value.encode()) for name, value in extra.items()])
    if error.http_status >= 500 or error.retryable:
        lines += b"x-should-retry: true\r\n" if error.retryable else b"x-should-retry: false\r\n"
    return lines


def _only(headers: Headers, names: frozenset[bytes]) -> bytes:
    options = connection_options(headers)
    return render_headers([(name, value) for name, value in headers if name in names and name not in options])
