"""HandshakeSlots: the connections to a port whose peers have not proved yet that they belong there.

There are a few at a time, so that strangers cannot take the process's threads and descriptors. Invariant: whoever
connects gets a slot in a bounded time, whatever the others do. If all are taken, the oldest connection of the address
that has most is cut once it has had its share of time; until then a newcomer waits, and others in the port's backlog,
in their order.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter


class HandshakeSlots:
    """
    Args:
        size: number of slots.
        share_s: time that a connection has in any case.
    """

    def __init__(self, size: int, share_s: float) -> None:
        self._size = size
        self._share_s = share_s
        self._changed = threading.Condition()
        self._taken: dict[socket.socket, tuple[str, float]] = {}
        """Address of the peer, and when the slot was taken, in the order of these times."""
        self._is_closed = False

    def take(self, stream: socket.socket, host: str) -> bool:
        """Wait for a slot for a connection, and if need be take another one's. Returns False once closed.

        Args:
            host: address of the peer.
        """
        with self._changed:
            while not self._is_closed:
                if len(self._taken) < self._size:
                    self._taken[stream] = host, time.monotonic()
                    return True
                oldest = self._of_busiest_host()
                left = self._taken[oldest][1] + self._share_s - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                del self._taken[oldest]
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    oldest.shutdown(socket.SHUT_RDWR)
        return False

    def give_back(self, stream: socket.socket) -> None:
        """Free a connection's slot. May be called twice."""
        with self._changed:
            if self._taken.pop(stream, None) is not None:
                self._changed.notify_all()

    def close(self) -> None:
        """End the wait for a slot, for good. Connections that have one keep it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _of_busiest_host(self) -> socket.socket:
        """Return the oldest connection of the address that has most."""
        counts = Counter(host for host, _ in self._taken.values())
        return max(self._taken, key=lambda stream: counts[self._taken[stream][0]])
