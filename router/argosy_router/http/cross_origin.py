"""CrossOrigin: which web pages of other origins may read answers (CORS, as in the Fetch standard).

Owns: the answer to a browser's preflight request, and the header lines that every other answer has for browsers.
Must not know: routes, keys.
Invariant: credentials of a browser (cookies, client certificates) never count, so a page gets no further than anyone
who knows a key: `access-control-allow-credentials` is never sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from argosy_protocol.errors import BadRequest
from argosy_router.http.messages import Request

_ASKED_METHOD: Final = b"access-control-request-method"
_ASKED_HEADERS: Final = b"access-control-request-headers"
_PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, HEAD, POST, DELETE\r\n"
    b"access-control-max-age: 600\r\n"
    b"vary: Access-Control-Request-Headers\r\n"
)
_ANSWER: Final = b"access-control-expose-headers: *\r\nvary: Origin\r\n"


class CrossOrigin:
    """The origins whose pages may read answers; `*` among them stands for all, and none turns CORS off."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins: Final = frozenset(origin.encode() for origin in origins)
        self.is_on: Final = bool(self._origins)

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks, without a key, if a page may send a request."""
        return (
            self.is_on
            and request.method == b"OPTIONS"
            and request.header(b"origin") is not None
            and request.header(_ASKED_METHOD) is not None
        )

    def preflight_lines(self, request: Request) -> bytes:
        """Header lines of the answer to a preflight request, besides `answer_lines`.

        Raises:
            BadRequest: pages of this origin may not send requests.
        """
        if not self.allows(request):
            raise BadRequest("the page's origin is not in --allowed-origins")
        headers = request.header(_ASKED_HEADERS)
        # Named one by one: a `*` would not stand for `authorization`.
        asked = b"" if headers is None else b"access-control-allow-headers: %b\r\n" % headers
        return _PREFLIGHT + asked

    def answer_lines(self, request: Request) -> bytes:
        """Header lines of every answer to this request, errors included."""
        if not self.is_on:
            return b""
        if not self.allows(request):
            return b"vary: Origin\r\n"
        return b"access-control-allow-origin: %b\r\n" % (request.header(b"origin") or b"") + _ANSWER

    def allows(self, request: Request) -> bool:
        """Whether a page of an allowed origin has sent the request."""
        if not self.is_on:
            return False
        origin = request.header(b"origin")
        return origin is not None and (b"*" in self._origins or origin in self._origins)
