"""A client that writes bytes and judges what comes back.

Owns: which answers are findings. Must not know: how requests are made.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import httptools

TIMEOUT_S = 60.0
"""Longest wait for the end of an answer, or of the connection. It is far beyond what any case should take."""
OVERLOADED = frozenset((429, 503))


@dataclass(frozen=True)
class RawCase:
    """Bytes of one connection.

    Attributes:
        name: what is special about it.
        pieces: are written one after the other.
        path: that of the request, which determines the form of errors; empty if the server may read another one.
        has_end: whether the request is complete; the client closes its side of the connection otherwise.
    """

    name: str
    pieces: tuple[bytes, ...]
    path: str
    has_end: bool = True


class _Answer:
    """The first answer of a connection, but for 100."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_whole = False
        self.parser = httptools.HttpResponseParser(self)

        self.status = 0

    def on_body(self, data: bytes) -> None:
        if not self.is_whole:  # else it is of an answer to what the server took for a second request
            self.body += data

    def on_message_complete(self) -> None:
        if not self.is_whole and self.parser.get_status_code() != 100:
            self.is_whole, self.status = True, self.parser.get_status_code()


async def finding(port: int, case: RawCase, timeout_s: float = TIMEOUT_S) -> str | None:
    """Send a case; return what is wrong with the answer, None if nothing is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = _Answer()
    try:
        async with asyncio.timeout(timeout_s):
            try:
                for piece in case.pieces:
                    writer.write(piece)
                    await writer.drain()
                if not case.has_end:
                    writer.write_eof()
            except (ConnectionError, OSError):
                pass  # refused before all was sent: there may be an answer to read
            return await _judged(reader, answer, case)
    except TimeoutError:
        return f"no answer within {timeout_s:.0f} s"
    finally:
        writer.transport.abort()


async def _judged(reader: asyncio.StreamReader, answer: _Answer, case: RawCase) -> str | None:
    received = 0
    while not answer.is_whole:
        try:
            data = await reader.read(65536)
        except ConnectionError:
            return None  # refused before all was read, so that the answer may be lost
        if not data:
            if received == 0 and not case.has_end:
                return None
            return f"the connection ended after {received} bytes of the answer"
        received += len(data)
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserError as error:
            return f"no HTTP: {error}"
    return wrong_answer(answer.status, bytes(answer.body), case.path)


def wrong_answer(status: int, body: bytes, path: str) -> str | None:
    """Return what is wrong with a complete answer; None if nothing is."""
    if status >= 500 and status not in OVERLOADED:
        return f"status {status}: {body[:200]!r}"
    if status < 400:
        return None
    try:
        sent = json.loads(body)
        error = sent["error"]
        is_messages = sent.get("type") == "error"
        is_good = (
            isinstance(error["message"], str) and bool(error["message"]) and isinstance(error["type"], str)
        )
        is_good = is_good and (is_messages or {"param", "code"} <= error.keys())
        is_good = is_good and (not path or is_messages == path.startswith("/v1/messages"))
    except (ValueError, TypeError, KeyError, AttributeError):
        is_good = False
    return None if is_good else f"status {status} without an error in its form: {body[:200]!r}"
