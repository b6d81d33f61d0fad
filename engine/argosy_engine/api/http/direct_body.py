"""DirectBody: writes pieces of a response's body to the connection from wherever they arise, without a task's turn.

A piece that is sent as usual wakes the request's task, which resumes through every layer between the server and the
endpoint, once for each token of each stream. Here it costs a write.

Owns: when a piece may be written so. Must not know: what pieces are, who makes them.
Invariant: the owner of the response sends its status, its first piece and its end as usual, and writes here only while
it is sending nothing itself, so the order of the pieces is kept. A layer that is to see all messages of a response
takes this out of the scope (`without_direct_body`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY = "argosy.direct_body"


class DirectBody:
    """
    Args:
        cycle: of the request in uvicorn's protocol.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether a piece can be written now: the status is sent, the client is there and reads, and the body has no
        length that was announced."""
        cycle = self._cycle
        return bool(
            cycle.response_started
            and cycle.chunked_encoding
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
            and cycle.scope["method"] != "HEAD"
        )

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty, if `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def offer_direct_body(scope: Any, cycle: RequestResponseCycle) -> None:
    """Put the cycle into the scope of its request."""
    scope[_KEY] = cycle


def direct_body(scope: Mapping[str, Any]) -> DirectBody | None:
    """Return what pieces can be written with; None if all must be sent as usual."""
    cycle = scope.get(_KEY)
    return None if cycle is None else DirectBody(cycle)


def without_direct_body(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the scope for layers that see all messages."""
    return {name: value for name, value in scope.items() if name != _KEY}
