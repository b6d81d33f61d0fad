"""Which headers cross the router, and request ids.

Owns: header rules of both directions. Must not know: routing.
Invariant: only the headers listed here cross the router. So nothing a client sends can look like the word of a router
to an engine, ours or another make's (`x-data-parallel-rank`), and nothing an engine sends like ours to a client.
"""

from __future__ import annotations

import re
import secrets
from itertools import count
from typing import Final

from argosy_router.http.messages import Headers, connection_options, render_headers

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_FORWARDED: Final = frozenset((b"accept", b"content-type", b"traceparent", b"tracestate", b"user-agent"))
"""Towards engines: what describes the body and the answer, trace context, and who asks, for the engine's log. Not
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
    """The client's id if it is one we can pass on safely, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return b"%b-%d" % (_process, next(_numbers))


def forwarded(headers: Headers) -> bytes:
    """A client's headers as an engine gets them."""
    return _only(headers, _FORWARDED)


def returned(headers: Headers) -> bytes:
    """An engine's headers as the client gets them."""
    return _only(headers, _RETURNED)


def _only(headers: Headers, names: frozenset[bytes]) -> bytes:
    options = connection_options(headers)
    return render_headers([(name, value) for name, value in headers if name in names and name not in options])
