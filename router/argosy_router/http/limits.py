"""Bounds of what clients may send, one by one and together.

Owns: the numbers, and the count of body bytes in hand. Must not know: connections, requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy_protocol.errors import Unavailable
from argosy_router.http.seats import Network


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of one client connection, and of all together. Sizes in bytes, times in seconds."""

    max_header_bytes: int = 32 * 1024
    """Request line and headers; nginx's default for large headers is the same."""
    max_headers: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    """A million tokens of text are 4 MB; images travel inline as base64."""
    max_unread_body_bytes: int = 16 * 1024
    """Of a body that nobody will look at."""
    max_inflight_bytes: int = 512 * 1024 * 1024
    """Of all bodies on their way in or of requests without a whole answer: a quarter of the memory that the chart gives
    a router. Each is held once, and decoding doubles one of them for a moment."""
    header_timeout_s: float = 10.0
    """From a request's first byte to the end of its headers (slowloris)."""
    body_timeout_s: float = 30.0
    """Within each such period a client must deliver `min_body_rate` bytes per second."""
    min_body_rate: int = 1024
    max_connections: int = 16384
    """Of all clients together; the command line takes fewer where the process may not open the files (`seats`)."""
    max_silent_per_address: int = 0
    """Of one client's address, connections without a whole request head; zero: an eighth of `max_connections`."""
    trusted_proxies: tuple[Network, ...] = ()
    """Networks of proxies, which many clients share: no bound per address holds there."""
    surplus_timeout_s: float = 1.0
    """How long a connection too many has to begin its request, which is then refused."""
    keep_alive_s: float = 75.0
    write_stall_s: float = 60.0
    """How long a client may leave the write buffer full before it is cut off."""
    write_buffer_bytes: int = 256 * 1024
    """Above this the replica is paused."""
    moderation_s: float = 0.0005
    """Where many streams are fast, the event loop turns once in this time (`moderation`); 0 never waits."""
    max_held_bytes: int = 64 * 1024
    """Bytes accepted ahead of the answer being written; a client that sends more gets that answer and no other."""
    tls_handshake_timeout_s: float = 10.0
    """From accepting a connection to the end of its handshake."""
    linger_s: float = 1.0
    """After refusing a request: how long to discard input, so that the refusal is not lost to a TCP reset."""


class BodyRoom:
    """Body bytes that all connections of a server hold."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Raises: Unavailable: there is no room; nothing was taken."""
        if self.held + size > self._limit:
            raise Unavailable("the router holds as many request bytes as it may", retry_after_s=1.0)
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size
