"""Which headers cross the router, and request ids.

Owns: header rules of both directions. Must not know: routing.
Invariant: nothing a client sends can look like the router's own word to an engine, and nothing an engine sends can
look like the router's own word to a client.
"""

from __future__ import annotations

import re
import secrets
from itertools import count
from typing import Final

from argosy_router.http.messages import HOP_BY_HOP, Headers, connection_options, render_headers

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_NOT_FORWARDED: Final = HOP_BY_HOP | {
    b"accept-encoding",  # answers are read for usage and event boundaries: no compression inside the fleet
    b"api-key",  # like x-api-key a credential, by the name another service has for it
    b"authorization",  # the client's key is for us; the engine gets its own
    b"content-length",
    b"cookie",
    b"expect",
    b"forwarded",
    b"host",
    b"via",
    b"x-api-key",
    b"x-request-id",
    b"x-real-ip",
}
_NOT_RETURNED: Final = HOP_BY_HOP | {b"content-length", b"server", b"set-cookie", b"x-request-id"}
_RESERVED: Final = (b"x-argosy-", b"x-forwarded-", b"x-ratelimit-")

_process: Final = secrets.token_hex(8).encode()
_numbers: Final = count(1)


def request_id(sent: bytes | None) -> bytes:
    """The client's id if it is one we can pass on safely, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return b"%b-%d" % (_process, next(_numbers))


def forwarded(headers: Headers) -> bytes:
    """A client's headers as an engine gets them."""
    return _without(headers, _NOT_FORWARDED)


def returned(headers: Headers) -> bytes:
    """An engine's headers as the client gets them."""
    return _without(headers, _NOT_RETURNED)


def _without(headers: Headers, dropped: frozenset[bytes]) -> bytes:
    options = connection_options(headers)
    return render_headers(
        [
            (name, value)
            for name, value in headers
            if name not in dropped and name not in options and not _is_reserved(name)
        ]
    )


def _is_reserved(name: bytes) -> bool:
    return name.startswith(b"x-") and name.startswith(_RESERVED)  # few names get as far as the second
