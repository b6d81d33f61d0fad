"""LingeringTransport: closes a connection so that a client that is still sending can read the last response.

Closing a socket with unread input resets the connection, and the reset overtakes the response: the client gets a broken
pipe instead of the 413. So our side is closed first, and input is read and discarded for a bounded time and number of
bytes (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class LingeringTransport:
    """Transport with the methods that uvicorn's protocol uses.

    Args:
        seconds, max_bytes: limits on the input that is discarded.
        stall_s: how long a closed connection may take to deliver what is written.
        is_owed: whether the client is still sending, asked when the connection is to be closed.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        max_bytes: int,
        is_owed: Callable[[], bool],
        stall_s: float,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._bytes_left = max_bytes
        self._is_owed = is_owed
        self._stall_s = stall_s
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = self._is_paused = False

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        if not self._is_closing:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Close at once, or linger if a part of the request is outstanding."""
        if self._is_owed():
            self.linger()
        elif not self.is_closing():
            self._is_closing = True
            self._transport.close()
            if self._transport.get_write_buffer_size():
                self._timer = self._loop.call_later(self._stall_s, self._end)

    def abort(self) -> None:
        """Close at once, without delivering what is written."""
        self.lost()
        self._transport.abort()

    def linger(self) -> None:
        """Close our side, and the connection a moment later."""
        if self.is_closing():
            return
        self._is_closing = True
        if not self._transport.can_write_eof():  # TLS, which ends both sides at once
            self._transport.close()
            return
        self._transport.write_eof()
        self.resume_reading()
        self._timer = self._loop.call_later(self._seconds, self._end)

    def discard(self, data: bytes) -> None:
        """Discard input received after our side was closed."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0 and self._timer is not None:
            self._end()

    def lost(self) -> None:
        """Clean up after the connection was lost."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self.lost()
        if self._transport.get_write_buffer_size():  # it does not read either
            self._transport.abort()
        else:
            self._transport.close()
