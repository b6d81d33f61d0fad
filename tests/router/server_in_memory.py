"""The router's HTTP server without sockets and without time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from argosy_protocol.errors import ApiError
from argosy_router.config import ServerLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.messages import Request
from argosy_router.http.server_connection import ServerConnection, ServerState

Message = tuple[bytes, bytes, bytes]
"""Method, target, body."""

LIMITS = ServerLimits(max_body_bytes=4096)


class Clock:
    """The part of a loop that a timer wheel needs; time stands still."""

    def time(self) -> float:
        return 0.0

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        return None


class Wire(asyncio.Transport):
    """Where the answers go."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Recorder:
    """An application that answers everything at once."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def on_head(self, request: Request) -> bool:
        return True

    def on_refused(self, error: ApiError, request: Request | None) -> tuple[bytes, bytes]:
        return b"", error.body()

    def on_request(self, connection: ServerConnection, request: Request) -> None:
        self.messages.append((request.method, request.target, request.body))
        connection.respond(200, b"", b"{}")


def ours(pieces: Iterable[bytes], recorder: Recorder | None = None) -> tuple[list[Message], bytes]:
    """What our connection takes the stream for, and what it answers."""
    recorder, wire = recorder or Recorder(), Wire()
    wheel = TimerWheel(cast("asyncio.AbstractEventLoop", Clock()))
    connection = ServerConnection(ServerState(recorder, LIMITS, wheel))
    connection.connection_made(wire)
    for piece in pieces:
        if wire.is_closed:
            break
        connection.data_received(piece)
    return recorder.messages, wire.sent.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
