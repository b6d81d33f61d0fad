"""One request of a batch: through this router's own queue, as the key's account, again after 429 and 503.

Owns: which answers are final. Must not know: files, results, how a request is routed.
Invariant: a request that is given up (its task cancelled) is aborted at its replica, like one whose client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from argosy_router.auth.accounts import BACKGROUND_PRIORITY, Account
from argosy_router.batch.answer_memory import HeldAnswer
from argosy_router.batch.batch_pace import BatchPace
from argosy_router.batch.input_lines import InputLine, model_of
from argosy_router.batch.line_waits import LineWaits
from argosy_router.http.messages import Request
from argosy_router.http.server_interface import Client, ClientListener
from argosy_router.proxy.request.body_rewrite import with_fields

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
MIN_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 60.0
_RETRIED: Final = frozenset((429, 503))
"""Repeated until the batch expires: the request can succeed once there is capacity."""
_FAILED_UPSTREAM: Final = frozenset((0, 408, 502, 504))
"""Repeated a few times: the request itself may be what fails replicas. 0: the answer was cut."""
MAX_FAILURES: Final = 4
_PRIORITIZED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints whose requests have the field `priority`."""

Send = Callable[[Client, Request, Account], None]


class LineAnswer(NamedTuple):
    """The final answer to a request."""

    status: int
    request_id: str
    body: bytes


class LineRequests:
    """Sends the requests of all batches that one router runs."""

    def __init__(
        self,
        send: Send,
        pace: BatchPace,
        on_retry: Callable[[], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`send` answers a request of an account through the router's queue."""
        self._send = send
        self._pace = pace
        self._on_retry = on_retry
        self._sleep = sleep

    async def answer(
        self, line: InputLine, account: Account, waits: LineWaits, held: HeldAnswer
    ) -> LineAnswer:
        """Send a request until it has a final answer.

        Args:
            waits: those of its batch.
            held: counts the answer's bytes, until its user clears it.

        Raises:
            PaceClosed: no further request is sent.
        """
        body = bytes(line.body)
        if line.url in _PRIORITIZED:
            body = with_fields(body, {"priority": BACKGROUND_PRIORITY})
        model = model_of(line)
        attempts = failures = 0
        while True:
            async with contextlib.AsyncExitStack() as turn:
                with waits.waiting():
                    await turn.enter_async_context(self._pace.turn(model))
                status, headers, answer = await self._attempt(line.url, body, account, held)
            failures += status in _FAILED_UPSTREAM
            if status not in _RETRIED and (status not in _FAILED_UPSTREAM or failures >= MAX_FAILURES):
                waits.answered()
                return LineAnswer(status or 502, _value(headers, b"x-request-id"), answer)
            held.clear()
            attempts += 1
            self._on_retry()
            if status in _RETRIED:
                waits.refused()
            with waits.waiting():
                await self._sleep(_backoff_s(attempts, _value(headers, b"retry-after")))

    async def _attempt(
        self, url: str, body: bytes, account: Account, held: HeldAnswer
    ) -> tuple[int, bytes, bytes]:
        """Return status, header lines and body of an answer; status 0 if it was cut."""
        request = Request(
            b"POST",
            url.encode(),
            [(b"content-type", b"application/json")],
            is_http10=False,
            keep_alive=True,
        )
        request.body, request.body_bytes = body, len(body)
        client = _LineClient(held)
        self._send(client, request, account)
        try:
            return await client.answer
        finally:
            client.leave()


class _LineClient:
    """A client without a connection, which reads the whole answer. A `Client`."""

    def __init__(self, held: HeldAnswer) -> None:
        self._held = held
        self.answer: asyncio.Future[tuple[int, bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._listener: ClientListener | None = None
        self._head = (0, b"")
        self._body = bytearray()

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener
        self._held.reads(listener.on_client_paused, listener.on_client_resumed)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self._held.add(len(body))
        self._end(status, headers, body)

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._head = status, headers
        self.send(first)

    def send(self, data: bytes) -> None:
        self._body += data
        self._held.add(len(data))
        if len(self._body) > MAX_ANSWER_BYTES:
            listener = self._listener
            self.abort()
            if listener is not None:
                listener.on_client_lost()

    def finish(self) -> None:
        self._end(*self._head, bytes(self._body))

    def abort(self) -> None:
        self._end(0, b"", b"")

    def leave(self) -> None:
        """Abort the request unless it has been answered."""
        self._held.stops_reading()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_client_lost()

    def _end(self, status: int, headers: bytes, body: bytes) -> None:
        self._listener = None
        self._held.stops_reading()
        if not self.answer.done():
            self.answer.set_result((status, headers, body))


def _value(headers: bytes, name: bytes) -> str:
    """The value of a header in rendered lines; empty if absent."""
    for line in headers.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().decode("latin-1")
    return ""


def _backoff_s(attempts: int, hint: str) -> float:
    """How long to wait before the next attempt: as the answer says, longer each time, not all at the same moment."""
    asked = float(hint) if hint.isascii() and hint.isdigit() and len(hint) < 6 else 0.0
    growing = MIN_BACKOFF_S * 2 ** min(attempts, 10)
    return min(MAX_BACKOFF_S, max(asked, growing)) * random.uniform(0.75, 1.25)  # noqa: S311
