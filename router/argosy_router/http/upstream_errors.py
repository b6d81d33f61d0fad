"""Errors between the router and a replica.

UpstreamError
├── ConnectFailed       no connection: refused, unreachable, or the connect deadline passed
├── ConnectionLost      the connection ended before the response did
├── FirstByteTimeout    connected, but no response in time
├── IdleTimeout         the response stalled
├── MalformedResponse   not HTTP, over our limits, or a status no proxy may forward
└── RequestUnsendable   the router could not write the request for this replica

Their messages are for the log; clients get errors of `argosy_protocol.errors`.
"""

# Not compiled: only declares exceptions.

from __future__ import annotations

from typing import ClassVar


class UpstreamError(Exception):
    """Base of the tree."""

    reason: ClassVar[str] = "error"
    """Label value in metrics and the log."""


class ConnectFailed(UpstreamError):
    reason = "connect"

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """The host is up but nothing listens on the port: the process is gone, and a second attempt would tell no
        more."""


class ConnectionLost(UpstreamError):
    reason = "reset"

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale
        """A reused connection closed before the first byte of the response: the usual race with the replica's own
        keep-alive timeout, which says nothing about its health."""


class FirstByteTimeout(UpstreamError):
    reason = "first_byte_timeout"


class IdleTimeout(UpstreamError):
    reason = "idle_timeout"


class MalformedResponse(UpstreamError):
    reason = "malformed"


class RequestUnsendable(UpstreamError):
    """Nothing was sent: the router has a flaw that this request meets."""

    reason = "unsendable"
