"""The requests of batches: how many may be in flight and whose is the next, which of a batch wait, and each one's way
through the router's queue, as the batch's account, again after 429 and 503.

Owns: the number of this process's requests in flight, by model; when a batch only waits, so that it may yield its
place; which answers are final. Must not know: files, results, HTTP.
Invariants: a model has no more requests in flight than its router had room for when it was last asked, one at least;
the accounts that wait for a model take turns, and the models too; a request that ends wakes those that can go, and
nobody else. No model has so many that others have none: one request of each may always be in flight. The routers decide
in the end: what they have no room for they refuse, and it is sent again. A request that is given up (its task
cancelled) is aborted at its replica, like one whose client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final, Protocol

import msgspec

from argosy_batch.batch_lines import InputLine, LineAnswer, model_of
from argosy_batch.router_client import CUT, CUT_UNREAD, NOT_SENT, Attempt, HeldAnswer, NoRoom
from argosy_protocol.batch_program import BACKGROUND_PRIORITY

ASK_S: Final = 1.0
"""Pause between two questions for the room of a model that others have freed or taken."""
SHARE: Final = 3
"""A model may have so many times the places that are free (see `argosy_protocol.program.process`): one alone has three
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


YIELD_AFTER_S: Final = 60.0
"""A batch whose requests have all been refused for this long only waits. Beginning it again reads its files."""


class LineWaits:
    """Which requests of one batch wait, and since when all that were sent have been refused.

    Invariant: once `end` was called no request of the batch is sent, and none waits; those in flight go on.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waiting: set[asyncio.Task[object]] = set()
        self._refused_since: float | None = None
        self._has_ended = False

    def refused(self) -> None:
        """Note that a request will be sent again, because it was answered with 429 or 503."""
        if self._refused_since is None:
            self._refused_since = self._now()

    def answered(self) -> None:
        """Note that a request has its final answer."""
        self._refused_since = None

    @property
    def is_all(self) -> bool:
        """Whether the batch only waits."""
        return self._refused_since is not None and self._now() - self._refused_since >= YIELD_AFTER_S

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The current task waits inside the block.

        Raises:
            PaceClosed: no further request is sent.
        """
        if self._has_ended:
            raise PaceClosed
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    def end(self) -> None:
        """Cancel the tasks that wait, and let no other begin to."""
        self._has_ended = True
        for task in self._waiting:
            task.cancel()


MIN_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 60.0
_RETRIED: Final = frozenset((429, 503, NOT_SENT, CUT_UNREAD))
"""Repeated until the batch expires: the request can succeed once there is capacity, and a router."""
_FAILED_UPSTREAM: Final = frozenset((CUT, 408, 502, 504))
"""Repeated a few times: the request itself may be what fails replicas."""
MAX_FAILURES: Final = 4
_PRIORITIZED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints whose requests have the field `priority`."""
_decode_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Poster(Protocol):
    """Sends requests (see `RouterClient`)."""

    async def post(self, path: str, body: bytes, account: str, held: HeldAnswer) -> Attempt: ...

    async def is_reached(self) -> bool: ...


class LineRequests:
    """Sends the requests of all batches that one process runs."""

    def __init__(
        self,
        router: Poster,
        pace: LinePace,
        on_retry: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._router = router
        self._pace = pace
        self._on_retry = on_retry
        self._sleep = sleep

    async def answer(self, line: InputLine, account: str, waits: LineWaits, held: HeldAnswer) -> LineAnswer:
        """Send a request until it has a final answer.

        Args:
            waits: those of its batch.
            held: counts the answer's bytes, until its user clears it.

        Raises:
            PaceClosed: no further request is sent.
            AccountGone: no key has the account now.
        """
        body = bytes(line.body)
        if line.url in _PRIORITIZED:
            priority = msgspec.Raw(b"%d" % BACKGROUND_PRIORITY)
            body = msgspec.json.encode(_decode_fields(body) | {"priority": priority})
        model = model_of(line)
        attempts = failures = 0
        while True:
            async with contextlib.AsyncExitStack() as turn:
                with waits.waiting():
                    await turn.enter_async_context(self._pace.turn(model, account))
                try:
                    answer = await self._router.post(line.url, body, account, held)
                except NoRoom:
                    self._pace.refused(model)
                    answer = Attempt(429, 0.0, "", b"")
            failures += answer.status in _FAILED_UPSTREAM
            if answer.status not in _RETRIED and (
                answer.status not in _FAILED_UPSTREAM or failures >= MAX_FAILURES
            ):
                waits.answered()
                return LineAnswer(answer.status or 502, answer.request_id, answer.body)
            held.clear()
            attempts += 1
            self._on_retry()
            if answer.status in _RETRIED:
                waits.refused()
            with waits.waiting():
                await self._sleep(_backoff_s(attempts, answer.retry_after_s))
                # What stands before the routers answers 502 or 504 while none of them can be reached; that is no
                # failure of the request, and is counted once.
                while answer.status in _FAILED_UPSTREAM and not await self._router.is_reached():
                    attempts += 1
                    waits.refused()
                    await self._sleep(_backoff_s(attempts, 0.0))


def _backoff_s(attempts: int, asked_s: float) -> float:
    """How long to wait before the next attempt: as the answer says, longer each time, not all at the same moment."""
    growing = MIN_BACKOFF_S * 2 ** min(attempts, 10)
    return min(MAX_BACKOFF_S, max(asked_s, growing)) * random.uniform(0.75, 1.25)  # noqa: S311
