"""How many requests of batches may be in flight, and whose is the next.

Owns: the number of this process's requests in flight, by model, and those that wait. Must not know: batches, HTTP.
Invariants: a model has no more requests in flight than its router had room for when it was last asked, one at least;
the accounts that wait for a model take turns, and the models too; a request that ends wakes those that can go, and
nobody else. No model has so many that others have none: one request of each may always be in flight. The routers decide
in the end: what they have no room for they refuse, and it is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

ASK_S: Final = 1.0
"""Pause between two questions for the room of a model that others have freed or taken."""
SHARE: Final = 3
"""A model may have so many times the places that are free (see `argosy_protocol.owner_slots`): one alone has three
quarters, so that one whose requests are not answered leaves places to others."""

Room = Callable[[str], Awaitable[int]]


class PaceClosed(Exception):
    """No further request is sent: the program stops."""


class _Model:
    """Requests for one model."""

    def __init__(self) -> None:
        self.inflight = 0
        self.limit = 1
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By account, the one whose turn it is first."""
        self.is_listed = False
        """Whether it is among those that can go."""
        self.asking: asyncio.Task[None] | None = None

    @property
    def can_go(self) -> bool:
        return bool(self.waiting) and self.inflight < self.limit

    def add(self, account: str, turn: asyncio.Future[None]) -> None:
        self.waiting.setdefault(account, deque()).append(turn)

    def remove(self, account: str, turn: asyncio.Future[None]) -> None:
        """Remove one whose task was cancelled; `next` may have dropped it before."""
        turns = self.waiting.get(account, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self.waiting[account]

    def next(self) -> asyncio.Future[None] | None:
        """Return whose turn it is; None if all that wait have been cancelled."""
        while self.waiting:
            account, turns = next(iter(self.waiting.items()))
            del self.waiting[account]
            turn = turns.popleft()
            if turns:
                self.waiting[account] = turns  # behind the others
            if not turn.done():
                return turn
        return None


class LinePace:
    """Admits the requests of all batches that one process runs."""

    def __init__(self, room: Room, *, max_inflight: int, ask_s: float = ASK_S) -> None:
        """
        Args:
            room: asks a router how many more requests for a model it would take now; must not raise.
            max_inflight: of all models; beyond it only one of a model that has none.
        """
        self._room = room
        self._max_inflight = max_inflight
        self._ask_s = ask_s
        self._models: dict[str, _Model] = {}
        """Those with requests in flight or waiting."""
        self._can_go: deque[str] = deque()
        self._is_closed = False
        self.inflight = 0
        """Requests of batches in flight."""

    def close(self) -> None:
        """Admit no further request; those that wait raise PaceClosed."""
        self._is_closed = True
        for model in self._models.values():
            if model.asking is not None:
                model.asking.cancel()
            for turns in model.waiting.values():
                for turn in turns:
                    if not turn.done():
                        turn.set_exception(PaceClosed())
            model.waiting = {}

    @contextlib.asynccontextmanager
    async def turn(self, name: str, account: str) -> AsyncIterator[None]:
        """Wait until one more request of `account` for the model `name` may be sent; it is in flight inside the block.

        Raises:
            PaceClosed: the program stops.
        """
        if self._is_closed:
            raise PaceClosed
        model = self._models.setdefault(name, _Model())
        turn = asyncio.get_running_loop().create_future()
        model.add(account, turn)
        self._offer(name, model)
        self._go()
        self._ask_again(name, model)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it was let go meanwhile
                self._left(name, model)
            else:
                model.remove(account, turn)
                self._forget(name, model)
            raise
        try:
            yield
        finally:
            self._left(name, model)

    def refused(self, name: str) -> None:
        """Note that a router had no room for a request of the model, which is still in flight."""
        model = self._models[name]
        model.limit = max(1, model.inflight - 1)

    def _left(self, name: str, model: _Model) -> None:
        self.inflight -= 1
        model.inflight -= 1
        self._offer(name, model)
        self._go()
        self._forget(name, model)

    def _forget(self, name: str, model: _Model) -> None:
        if not model.inflight and not model.waiting and self._models.get(name) is model:
            del self._models[name]
            if model.asking is not None:
                model.asking.cancel()

    def _offer(self, name: str, model: _Model) -> None:
        if model.can_go and not model.is_listed:
            model.is_listed = True
            self._can_go.append(name)

    def _go(self) -> None:
        without_place: list[str] = []
        while self._can_go:
            name = self._can_go.popleft()
            model = self._models.get(name)
            if model is None:
                continue
            if model.can_go and not self._has_place(model):
                without_place.append(name)
                continue
            model.is_listed = False
            if not model.can_go:
                continue
            turn = model.next()
            if turn is None:
                continue
            self.inflight += 1
            model.inflight += 1
            turn.set_result(None)
            self._offer(name, model)
        self._can_go.extend(without_place)

    def _has_place(self, model: _Model) -> bool:
        return not model.inflight or model.inflight < SHARE * (self._max_inflight - self.inflight)

    def _ask_again(self, name: str, model: _Model) -> None:
        """Have the room of a model asked for while requests wait for it."""
        if model.waiting and model.asking is None:
            model.asking = asyncio.create_task(self._ask(name, model), name="room for requests of batches")

    async def _ask(self, name: str, model: _Model) -> None:
        try:
            while model.waiting:
                if model.inflight >= model.limit:
                    room = await self._room(name)
                    model.limit = max(1, model.inflight + room)
                    self._offer(name, model)
                    self._go()
                await asyncio.sleep(self._ask_s)
        finally:
            model.asking = None
