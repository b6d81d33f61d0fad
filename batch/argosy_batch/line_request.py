"""One request of a batch: through the router's queue, as the batch's account, again after 429 and 503.

Owns: which answers are final. Must not know: files, results, how a request is sent.
Invariant: a request that is given up (its task cancelled) is aborted at its replica, like one whose client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, Protocol

import msgspec

from argosy_batch.answer_memory import HeldAnswer
from argosy_batch.input_lines import InputLine, model_of
from argosy_batch.line_pace import LinePace
from argosy_batch.line_waits import LineWaits
from argosy_batch.router_client import CUT, CUT_UNREAD, NOT_SENT, Attempt, NoRoom
from argosy_protocol.batch_program import BACKGROUND_PRIORITY

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
    """Sends requests (see `router_client.RouterClient`)."""

    async def post(self, path: str, body: bytes, account: str, held: HeldAnswer) -> Attempt: ...

    async def is_reached(self) -> bool: ...


class LineAnswer(NamedTuple):
    """The final answer to a request."""

    status: int
    request_id: str
    body: bytes


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
