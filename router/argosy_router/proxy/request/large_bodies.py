"""Large bodies, responses and records: read by another process, so that the event loop goes on serving everyone else.

Owns: that process, and whose body it reads next. Must not know: HTTP, attempts, how a replica is chosen.
Invariants: one body is read at a time, and accounts take turns, so that nobody waits longer for having a neighbour with
many; whatever becomes of the process, every request ends, and the next one finds a new process.

Decoding a body of 16 MiB takes some 100 ms, during which a thread would keep the interpreter's lock. The process starts
with the first large body and stays: most routers never see one.
"""

# Not compiled: it waits for another process.

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from argosy_protocol.errors import ApiError, InternalError, Unavailable
from argosy_protocol.owner_slots import OwnerTurns
from argosy_protocol.response_history import StoredResponse
from argosy_router.auth.accounts import Account
from argosy_router.http.server_interface import Client
from argosy_router.metrics.definitions import LARGE_BODIES
from argosy_router.metrics.series import Series
from argosy_router.proxy.request.body_process import (
    LENGTH_BYTES,
    BodyJob,
    Found,
    Measurements,
    RecordJob,
    RecordParts,
    ResponseJob,
    Wish,
    frame,
)
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.request.call_decoding import CallDraft
from argosy_router.proxy.request.ended_response import (
    Fields,
    FoundResponse,
    decoded_record,
    found_response,
    read_record,
)
from argosy_router.proxy.request.examination import RoutedEndpoint
from argosy_router.proxy.request.examined import Examined

log = logging.getLogger(__name__)

LARGE_BODY_BYTES: Final = 1 << 20
"""Bodies above this size are large. Reading a smaller one takes a few milliseconds."""
_SMALL_BODY_BYTES: Final = 64 << 10
"""Bodies up to this size are large by their values only: reading one takes some milliseconds at most."""
_MANY_VALUES: Final = 8192
"""Commas of a body that is large, whatever its size: reading takes a microsecond for an empty part of a message."""
_PIECE_BYTES: Final = 256 << 10
"""Sent between two turns of the event loop."""
_PATIENCE_S: Final = 60.0
"""For one body; a process that takes longer is hanging."""
_RETRY_AFTER_S: Final = 1.0
_TRIES: Final = 2
"""Of reading a response."""

_Message = TypeVar("_Message")
_Answer = TypeVar("_Answer")


class BodyProcess:
    """A process that reads bodies, and the conversation with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._in = process.stdin
        self._out = process.stdout

    @classmethod
    async def start(cls) -> BodyProcess:
        """Start a process.

        Raises:
            OSError: the system cannot start one.
        """
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "argosy_router.proxy.request.body_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def read(
        self, endpoint: RoutedEndpoint, body: bytes, has_state: bool, place: Callable[[Examined], CallDraft]
    ) -> Call:
        """Read a body, and let `place` find the service that it is for.

        Raises:
            ApiError: the body is refused, or `place` raised it.
            OSError, EOFError: the process has ended.
        """
        self._in.write(frame(BodyJob(endpoint, len(body), has_state)))
        await self._send(body)
        found = await self._received(Found)
        if found.examined is None:
            assert found.refusal is not None
            raise found.refusal.error()
        try:
            draft = place(found.examined)
        except BaseException:
            self._in.write(frame(Wish(None)))
            raise
        changes = {name: msgspec.json.encode(value) for name, value in draft.changes.items()}
        is_reduced = draft.is_for_foreign_engines
        if is_reduced:
            changes |= dict(draft.additions)
        self._in.write(frame(Wish(draft.seed, changes, is_reduced)))
        answer = await self._received(Measurements)
        if answer.body_bytes is not None:
            body = await self._out.readexactly(answer.body_bytes)
        if not is_reduced:
            body = draft.with_additions(body)
        call = draft.call(body, answer.measured())
        call.is_body_reduced = is_reduced
        return call

    async def find_response(self, answer: bytes, is_event: bool, fields: Fields) -> FoundResponse:
        """Find the response in an answer.

        Raises:
            OSError, EOFError: the process has ended.
        """
        self._in.write(frame(ResponseJob(len(answer), is_event, fields)))
        await self._send(answer)
        return await self._received(FoundResponse)

    async def find_record(self, record: bytes, has_output: bool) -> tuple[RecordParts, bytes]:
        """Find the parts of a record, and its output.

        Raises:
            OSError, EOFError: the process has ended.
        """
        self._in.write(frame(RecordJob(len(record), has_output)))
        await self._send(record)
        parts = await self._received(RecordParts)
        return parts, await self._out.readexactly(parts.output_bytes)

    async def _send(self, body: bytes) -> None:
        view = memoryview(body)
        for start in range(0, len(view), _PIECE_BYTES):
            self._in.write(view[start : start + _PIECE_BYTES])
            await self._in.drain()

    async def _received(self, kind: type[_Message]) -> _Message:
        length = int.from_bytes(await self._out.readexactly(LENGTH_BYTES), "big")
        return msgspec.msgpack.decode(await self._out.readexactly(length), type=kind)

    async def kill(self) -> None:
        """End the process, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._in.close()
        await self._process.wait()


def is_large(body: bytes, account: Account, now: float) -> bool:
    """Whether another process reads a body: a long one, or if its account sends much in little time. A body of more
    than `_SMALL_BODY_BYTES` that is read here is counted as sent."""
    if takes_long(body):
        return True
    size = len(body)
    return size > _SMALL_BODY_BYTES and not account.may_read_at_once(size, now)


def takes_long(body: bytes) -> bool:
    """Whether reading a body would hold up other requests, whoever sends it: by its size, or because it may have many
    values (commas in texts count, too)."""
    return len(body) > LARGE_BODY_BYTES or body.count(b",") > _MANY_VALUES


class _Reading:
    """A body that waits or is being read. The `ClientListener` of its client."""

    def __init__(self) -> None:
        self.is_wanted = True
        self.has_begun = False
        self.task: asyncio.Task[None] | None = None

    def on_client_lost(self) -> None:
        self.is_wanted = False
        if self.task is not None and not self.has_begun:
            self.task.cancel()  # and so lets go of the body; a conversation that has begun is completed

    def on_client_paused(self) -> None:
        pass

    def on_client_resumed(self) -> None:
        pass


class LargeBodies:
    """Reads the large bodies of one router."""

    def __init__(self, start: Callable[[], Any] = BodyProcess.start) -> None:
        """`start` returns an awaitable of a new `BodyProcess`."""
        self._start = start
        self.process: BodyProcess | None = None
        """The process that reads; None before the first large body, and after a process has ended."""
        self._turns = OwnerTurns(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._conversations: set[asyncio.Future[Any]] = set()
        """About responses and records."""
        self._is_closed = False
        self._counts = LARGE_BODIES.counter()

    def series(self) -> tuple[Series, ...]:
        return (self._counts,)

    def read(
        self,
        client: Client,
        endpoint: RoutedEndpoint,
        body: bytes,
        account: object,
        place: Callable[[Examined], CallDraft],
        *,
        has_state: bool,
        on_call: Callable[[Call], None],
        on_refused: Callable[[ApiError], None],
    ) -> None:
        """Have a body read, and call `on_call` or `on_refused` later, unless its client is lost.

        Args:
            account: whose body it is.
            place: finds the service of a body that has been examined; may raise ApiError.
            has_state: see `examine`.
        """
        reading = _Reading()

        async def work() -> None:
            try:
                if self._is_closed:
                    raise Unavailable("the router is stopping; retry", retry_after_s=_RETRY_AFTER_S)
                call = await self._read(reading, endpoint, body, account, place, has_state)
            except ApiError as error:
                self._counts.add(("unavailable" if isinstance(error, Unavailable) else "refused",))
                if reading.is_wanted:
                    on_refused(error)
            except Exception:
                log.exception("a large request failed")
                self._counts.add(("unavailable",))
                if reading.is_wanted:
                    on_refused(InternalError("internal error"))
            else:
                if call is not None and reading.is_wanted:
                    self._pass_on(call, client, on_call)

        reading.task = task = asyncio.create_task(work(), name="large body")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        client.attach(reading)

    async def find_response(self, owner: str, answer: bytes, is_event: bool, fields: Fields) -> FoundResponse:
        """Find the response in an answer (see `found_response`); of a large one by the other process, or by a new one
        if that fails, since nothing generates it again. If that fails, too, the answer is perhaps what ends them, and
        has none."""
        if not takes_long(answer):
            return found_response(answer, is_event, fields)
        async with self._turns.turn(owner):
            for _ in range(_TRIES):
                if self._is_closed:
                    break
                try:
                    return await self._whole(lambda process: process.find_response(answer, is_event, fields))
                except Unavailable:
                    self._counts.add(("unavailable",))
        log.error("a large response could not be read, and is not stored")
        return FoundResponse()

    async def read_record(self, owner: str, record: bytes, has_output: bool) -> StoredResponse:
        """Read the record of a stored response.

        Args:
            has_output: whether its output is wanted; of a short record it is there in any case.

        Raises:
            ValueError: it is none.
            Unavailable: the other process has failed.
        """
        if not takes_long(record):
            return decoded_record(record)
        async with self._turns.turn(owner):
            parts, output = await self._whole(lambda process: process.find_record(record, has_output))
        if parts.found is None:
            return decoded_record(record)  # perhaps one of another release, which is written otherwise
        return await read_record(record, parts.found, output)

    def _pass_on(self, call: Call, client: Client, on_call: Callable[[Call], None]) -> None:
        try:
            on_call(call)
        except Exception:  # something else answers the client by now, perhaps
            log.exception("a large request failed")
            client.abort()

    async def idle(self) -> None:
        """Wait until no body waits or is being read."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _read(
        self,
        reading: _Reading,
        endpoint: RoutedEndpoint,
        body: bytes,
        account: object,
        place: Callable[[Examined], CallDraft],
        has_state: bool,
    ) -> Call | None:
        """Read a body once it is its account's turn; None if it is not wanted any more then."""
        async with self._turns.turn(account):
            if not reading.is_wanted:
                return None
            reading.has_begun = True
            return await self._converse(lambda process: process.read(endpoint, body, has_state, place))

    async def _whole(self, converse: Callable[[BodyProcess], Awaitable[_Answer]]) -> _Answer:
        """Have a conversation that goes on to its end when the caller is cancelled, and that is the caller's turn: one
        that is cut ends the process, and clients that leave would have others wait for a new one."""
        conversation = asyncio.ensure_future(self._converse(converse))
        self._conversations.add(conversation)
        conversation.add_done_callback(self._conversations.discard)
        try:
            return await asyncio.shield(conversation)
        except asyncio.CancelledError:
            await asyncio.wait([conversation])
            raise

    async def _converse(self, converse: Callable[[BodyProcess], Awaitable[_Answer]]) -> _Answer:
        """Have a conversation with the process, which is started if need be.

        Raises:
            Unavailable: the process has failed.
        """
        try:
            if self.process is not None and self.process.has_ended:
                await self._end_process()
            if self.process is None:
                self.process = await self._start()
            async with asyncio.timeout(_PATIENCE_S):
                answer = await converse(self.process)
        except ApiError:
            raise
        # A timeout, a dead process, and a pipe that uvloop has closed.
        except (OSError, EOFError, RuntimeError) as error:
            log.error("the process that reads large requests has failed: %s", error or type(error).__name__)
            await self._end_process()
            raise Unavailable(
                "the router could not read this request, which is large; retry", retry_after_s=_RETRY_AFTER_S
            ) from None
        except BaseException:
            await self._end_process()  # the conversation is not complete
            raise
        self._counts.add(("read",))
        return answer

    async def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await process.kill()

    async def close(self) -> None:
        """Give up what is being read, end the process, and refuse what comes later."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_process()
        if self._conversations:  # which have failed now, or have started a process
            await asyncio.wait(self._conversations)
            await self._end_process()
