"""How many clients may be connected, and who gives way when one more comes.

Owns: the count, and the order of those that are between two requests. Must not know: what is said on a connection.
Invariants: a newcomer is turned away only while all others are busy, or have yet to send their first request; none of
them is ever cut for it. Of those turned away at most `MAX_SURPLUS` are there to hear it.

Descriptors are the scarce good: each request takes two, the client's connection and the replica's, so the default is
half of what the process may open (HAProxy's rule). Like nginx, the router closes kept connections that idle before it
refuses new ones: their clients open another one, as they must when a keep-alive timeout meets their next request.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy_router.http.server import ServerConnection

MAX_SURPLUS = 256
"""Connections that are being told that they are too many; a further one is reset."""
SPARE_DESCRIPTORS = 512
"""For those, for telemetry, the admin port and files."""
MAX_DEFAULT = 16384
"""An event loop is busy with far fewer requests; what idles costs some 3 KB each."""
MIN_DEFAULT = 64


def open_files_limit() -> int:
    """Descriptors that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * MAX_DEFAULT + SPARE_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def default_connections(open_files: int) -> int:
    """How many clients may be connected where nobody says it."""
    return max(MIN_DEFAULT, min(MAX_DEFAULT, (open_files - SPARE_DESCRIPTORS) // 2))


class Seats:
    """The places of one server."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._surplus = 0
        self.refused = 0
        """Connections without a seat so far."""
        self.idle: dict[ServerConnection, None] = {}
        """Kept connections between two requests; the one that has been for longest comes first."""

    def take(self) -> bool:
        """A connection has come; `leave` must follow. Returns whether there is a seat for it."""
        if self._taken < self._limit or self._one_gives_way():
            self._taken += 1
            return True
        self._surplus += 1
        self.refused += 1
        return False

    @property
    def is_crowded(self) -> bool:
        """Whether too many stand to be told so."""
        return self._surplus > MAX_SURPLUS

    def leave(self, connection: ServerConnection, *, is_seated: bool) -> None:
        """The connection has ended."""
        self.idle.pop(connection, None)
        if is_seated:
            self._taken -= 1
        else:
            self._surplus -= 1

    def _one_gives_way(self) -> bool:
        while self.idle:
            longest = next(iter(self.idle))
            del self.idle[longest]
            if longest.give_way():
                return True
        return False
