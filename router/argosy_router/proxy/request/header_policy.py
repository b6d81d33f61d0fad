"""Header policy: the request and response headers that cross the router.

Owns: the lists of forwarded headers, one for each direction. Must not know: routing.
Invariant: only the headers listed here cross the router. A client therefore cannot forge the router's headers towards
an engine (`x-data-parallel-rank`), and an engine cannot forge the router's headers towards a client.
"""

from __future__ import annotations

from typing import Final

from argosy_protocol.headers import DROPPED_TOOLS, RESOURCE_BUSY
from argosy_router.http.messages import Headers, connection_options, render_headers

_FORWARDED: Final = frozenset(
    (
        *(b"accept", b"anthropic-beta", b"anthropic-version"),
        *(b"content-type", b"traceparent", b"tracestate", b"user-agent"),
    )
)
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
        DROPPED_TOOLS.encode(),
        RESOURCE_BUSY.encode(),
        b"x-should-retry",
    )
)
"""Towards clients: what describes the body, and what OpenAI's SDKs and proxies in front of the router obey."""


def forwarded(headers: Headers) -> bytes:
    """Render a client's headers as an engine gets them."""
    return _only(headers, _FORWARDED)


def returned(headers: Headers) -> bytes:
    """Render an engine's headers as the client gets them."""
    return _only(headers, _RETURNED)


def _only(headers: Headers, names: frozenset[bytes]) -> bytes:
    options = connection_options(headers)
    return render_headers([(name, value) for name, value in headers if name in names and name not in options])
