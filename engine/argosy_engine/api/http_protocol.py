"""BoundedProtocol: uvicorn's HTTP protocol with a bound on everything that is no body.

uvicorn's option for it works with h11 only, and llhttp collects a header of any length before it tells anybody.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from argosy_engine.protocol.errors import HeadersTooLarge

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; trailers count too. Twice what the router takes from clients, because it adds some."""


class _TooLarge(Exception):
    """Stops the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431 and hangs up on a larger head, without waiting for its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        """Of the current request, as far as the parser has told."""
        self._untold_bytes = 0
        """Received since the last byte of a body, or end of a request: what the parser may be holding. What came in
        one read with those is not counted, so it may hold a read's size more."""
        self._is_refused = False

    def data_received(self, data: bytes) -> None:
        self._untold_bytes += len(data)
        super().data_received(data)
        if self._untold_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._untold_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser stops."""
        if self._is_refused:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._is_refused = True
            raise _TooLarge

    def _refuse(self) -> None:
        body = HeadersTooLarge(f"request line and headers exceed {MAX_HEAD_BYTES} bytes").body()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()
