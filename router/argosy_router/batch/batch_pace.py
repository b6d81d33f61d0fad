"""How many requests of batches may be in flight, so that interactive requests find capacity.

Owns: the number of this router's requests of batches in flight, by service.
Must not know: batches, queues.
Invariants: requests of batches have no more than `share` of what a service's replicas can take, at least one; no
further one is sent while an interactive request is queued for the service. They also have the lowest priority in the
queue and in engines that schedule by priority.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from argosy_router.fleet.fleet import Fleet
from argosy_router.flow_control.controller import FlowController

RECHECK_S: Final = 0.1
"""How soon capacity is noticed that others have freed; the same as flow control's tick."""


class PaceClosed(Exception):
    """No further request is sent: the router stops."""


class BatchPace:
    """Admits the requests of all batches that one router runs."""

    def __init__(
        self,
        fleet: Fleet,
        flow_control: FlowController,
        *,
        max_inflight: int,
        share: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`share` is of what a service's replicas can take, from 0 to 1."""
        self._fleet = fleet
        self._flow_control = flow_control
        self._max_inflight = max_inflight
        self._share = share
        self._now = now
        self._inflight: dict[str, int] = {}
        """By the name of the service; the empty one is none."""
        self._has_freed = asyncio.Event()
        self._is_closed = False

    @property
    def inflight(self) -> int:
        """Requests of batches in flight."""
        return sum(self._inflight.values())

    def close(self) -> None:
        """Admit no further request; those that wait raise PaceClosed."""
        self._is_closed = True
        self._has_freed.set()

    @contextlib.asynccontextmanager
    async def turn(self, model: str) -> AsyncIterator[None]:
        """Wait until one more request for `model` may be sent; it is in flight inside the block.

        Raises:
            PaceClosed: the router stops.
        """
        name = self._name(model)
        while self._is_closed or not self._may_go(name, model):
            if self._is_closed:
                raise PaceClosed
            self._has_freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_S):
                    await self._has_freed.wait()
        self._inflight[name] = self._inflight.get(name, 0) + 1
        try:
            yield
        finally:
            self._inflight[name] -= 1
            if not self._inflight[name]:
                del self._inflight[name]
            self._has_freed.set()

    def _name(self, model: str) -> str:
        service = self._fleet.service_of(model)
        return "" if service is None else service.model

    def _may_go(self, name: str, model: str) -> bool:
        if self.inflight >= self._max_inflight:
            return False
        running = self._inflight.get(name, 0)
        service = self._fleet.service_of(model)
        if (
            service is None or not running
        ):  # one may always try: it waits in the queue, or learns what is wrong
            return not running
        return self._flow_control.has_background_room(service, self._now(), running, self._share)
