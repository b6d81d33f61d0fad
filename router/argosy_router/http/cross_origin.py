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
_VARIES: Final = b"vary: Origin\r\n"
_ANSWER: Final = b"access-control-expose-headers: *\r\n" + _VARIES


class CrossOrigin:
    """The origins whose pages may read answers; `*` among them stands for all, and none turns CORS off."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins: Final = frozenset(origin.encode() for origin in origins)

    def mark(self, request: Request) -> None:
        """Note in a request whether a page of an allowed origin has sent it, and the header lines of every answer to
        it, errors included."""
        if not self._origins:
            return
        request.answer_lines = _VARIES
        origin = request.header(b"origin")
        if origin is not None and (b"*" in self._origins or origin in self._origins):
            request.is_from_allowed_page = True
            request.answer_lines = b"access-control-allow-origin: %b\r\n" % origin + _ANSWER

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks, without a key, if a page may send a request."""
        return (
            request.method == b"OPTIONS"
            and bool(self._origins)
            and request.header(b"origin") is not None
            and request.header(_ASKED_METHOD) is not None
        )

    def preflight_lines(self, request: Request) -> bytes:
        """Header lines of the answer to a preflight request that was marked, besides its `answer_lines`.

        Raises:
            BadRequest: pages of this origin may not send requests.
        """
        if not request.is_from_allowed_page:
            raise BadRequest("the page's origin is not in --allowed-origins")
        headers = request.header(_ASKED_HEADERS)
        # Named one by one: a `*` would not stand for `authorization`.
        asked = b"" if headers is None else b"access-control-allow-headers: %b\r\n" % headers
        return _PREFLIGHT + asked
