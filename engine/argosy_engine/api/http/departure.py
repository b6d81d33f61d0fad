"""Departure: tells the owner of a response that its client has left, without a task that waits for it.

ASGI tells of it by `receive` alone, which takes a task of its own beside each answer. The protocol knows it at once.

Owns: who is told. Must not know: what becomes of the work for the client.
Invariant: the request's body has been received before `watch`. A layer that is to see all messages takes this out of
the scope (`without_departure`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY = "argosy.departure"


class Departure:
    """
    Args:
        cycle: of the request in uvicorn's protocol.
    """

    __slots__ = ("_cycle", "_on_left")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_left: Callable[[], None] | None = None

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` once, when the client leaves, or at once if it has left."""
        if self._cycle.disconnected:
            on_left()
            return
        self._on_left = on_left
        self._cycle.flow.resume_reading()  # which a request behind this one has paused, or the end would not be seen

    def unwatch(self) -> None:
        self._on_left = None

    def tell(self) -> None:
        """Tell that the client has left; the protocol calls this."""
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()


def offer_departure(scope: Any, cycle: RequestResponseCycle) -> None:
    """Put the departure of a request's client into its scope."""
    scope[_KEY] = Departure(cycle)


def departure_of(scope: Mapping[str, Any]) -> Departure | None:
    """Return what tells that the client has left; None if that must be asked for by `receive`."""
    departure: Departure | None = scope.get(_KEY)
    return departure


def without_departure(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the scope for layers that see all messages."""
    return {name: value for name, value in scope.items() if name != _KEY}
