"""OutputSocket: reads the core's messages on the event loop, without a future of its own for each of them.

zmq.asyncio makes several futures and callbacks for every message, which cost more CPU time than a decode step's message
takes to decode and deliver. Here messages that have arrived are taken at once, and only a reader that has none waits.

Owns: the socket's place in the event loop, from the first wait to `close`. Must not know: what messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq

_NOBLOCK = int(zmq.NOBLOCK)


class OutputSocket:
    """
    Args:
        socket: a bound PULL socket. It belongs to its owner, who closes it after this.
        exited: is done once the core has ended.
        last_message_s: returns how long the last message of a core that has ended may take to arrive.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], exited: asyncio.Future[None], last_message_s: Callable[[], float]
    ) -> None:
        self._socket = socket
        self._exited = exited
        self._last_message_s = last_message_s
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        # The descriptor is readable when the socket's state may have changed; only a read that finds nothing resets it.
        self._loop.add_reader(socket.FD, self._wake)
        exited.add_done_callback(self._wake)

    async def receive(self) -> bytes | None:
        """Return the next message, in the order of arrival; None once the core has ended and has left none."""
        while (message := self._take()) is None:
            if self._exited.done():
                return await self._last()
            await self._wait()
        return message

    def close(self) -> None:
        """Leave the event loop."""
        self._loop.remove_reader(self._socket.FD)
        self._exited.remove_done_callback(self._wake)

    async def _last(self) -> bytes | None:
        """Wait for the message that the core may have sent before it ended."""
        message = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._last_message_s()):
                while (message := self._take()) is None:
                    await self._wait()
        return message

    def _take(self) -> bytes | None:
        try:
            return self._socket.recv(_NOBLOCK)
        except zmq.Again:
            return None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self, _exited: Any = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
