"""UpgradeIgnoringParser: takes requests that offer another protocol as requests of HTTP/1.1.

A server may ignore `Upgrade` (RFC 9110, 7.8), and clients rely on it: Java's HTTP client offers HTTP/2 with every
request until a server has answered. llhttp ends at the head of such a request and reports it without its body. Another
llhttp is given the head once more, without the offer; body and further requests follow. The first one would read no
more if the connection is to be closed after the request.

Must not know: what a request asks for, limits.
Invariant: what is read is what the client has sent, less `Upgrade` headers. No protocol is ever switched, so whoever
stands in front sees HTTP/1.1 as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import httptools

Head = tuple[bytes, Sequence[tuple[bytes, bytes]]]
"""Target and headers of a request, as the parser has reported them."""


class UpgradeIgnoringParser:
    """Parser with the methods of httptools'. Its owner ignores the ends of a head and of a message for which
    `offers_upgrade` is true: they are reported again.

    Args:
        new_parser: makes one of httptools'.
        head: returns the head that was reported last.
    """

    def __init__(self, new_parser: Callable[[], Any], head: Callable[[], Head]) -> None:
        self._new_parser: Final = new_parser
        self._head: Final = head
        self._take(new_parser())

    def _take(self, parser: Any) -> None:
        self._parser = parser
        self.get_method: Callable[[], bytes] = parser.get_method
        self.get_http_version: Callable[[], str] = parser.get_http_version
        self.should_keep_alive: Callable[[], bool] = parser.should_keep_alive
        self.should_upgrade: Callable[[], bool] = parser.should_upgrade

    @property
    def offers_upgrade(self) -> bool:
        """Whether the request offers another protocol. `CONNECT` asks for one instead, and cannot be read at all."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """
        Raises:
            httptools.HttpParserError: this is not HTTP, or a callback has failed.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[int(offer.args[0]) :]
            head = self._head_without_offer()
            self._take(self._new_parser())
            self._parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        target, headers = self._head()
        line = b"%b %b HTTP/%b\r\n" % (self.get_method(), target, self.get_http_version().encode())
        lines = [b"%b: %b\r\n" % header for header in headers if header[0].lower() != b"upgrade"]
        return b"".join((line, *lines, b"\r\n"))
