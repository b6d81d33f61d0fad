"""Large bodies, responses and records: read by another process, so that the event loop goes on serving everyone else.

Owns: that process (`python -m argosy_router.proxy.large_bodies`), the messages to it, and whose body it reads next.
Must not know: HTTP, attempts, how a replica is chosen; the process knows no services, accounts or connections.
Invariants: one body is read at a time, and accounts take turns, so that nobody waits longer for having a neighbour with
many; whatever becomes of the process, every request ends, and the next one finds a new process.

Decoding a body of 16 MiB takes some 100 ms, during which a thread would keep the interpreter's lock. The process starts
with the first large body and stays: most routers never see one. It answers each message in order, and ends when its
input does.

A message is its length (4 bytes, big-endian) and msgpack. A `BodyJob` is followed by its body, and its answer is
`Found`. If that is no refusal, the router sends a `Wish`, whose answer, if it has a seed, is `Measurements`, followed
by the body if that has changed. A `ResponseJob` is followed by what an engine answered; its answer is `FoundResponse`.
A `RecordJob` is followed by the record of a stored response; its answer is `RecordParts`, followed by the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from array import array
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar, cast

import msgspec

from argosy_protocol.errors import ApiError, BadRequest, InternalError, PayloadTooLarge, Unavailable
from argosy_protocol.program.process import OwnerTurns, return_freed_memory
from argosy_protocol.response_history import StoredResponse
from argosy_router.metric_series import Series
from argosy_router.prefixes import MeasuredPrompts, measure
from argosy_router.proxy.decoded_types import Examined
from argosy_router.proxy.ended_response import (
    Fields,
    FoundRecord,
    FoundResponse,
    decoded_record,
    found_record,
    found_response,
    read_record,
)
from argosy_router.proxy.request_body import (
    RoutedEndpoint,
    examine,
    keep_foreign_fields,
    takes_long,
    with_fields,
)

if TYPE_CHECKING:  # the process needs none of these
    from argosy_router.http.messages import Client
    from argosy_router.proxy.call import Call, CallDraft

# Not compiled: it runs as a program, and waits for that.

log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 256 << 10
"""Sent between two turns of the event loop."""
_PATIENCE_S: Final = 60.0
"""For one body; a process that takes longer is hanging."""
_RETRY_AFTER_S: Final = 1.0
_TRIES: Final = 2
"""Of reading a response."""
LENGTH_BYTES: Final = 4
"""Before each message."""

_Message = TypeVar("_Message")
_Answer = TypeVar("_Answer")


class BodyJob(msgspec.Struct, tag="body"):
    """Examine a body."""

    endpoint: str
    body_bytes: int
    has_state: bool


class ResponseJob(msgspec.Struct, tag="response"):
    """Find the response in an answer (see `found_response`)."""

    answer_bytes: int
    is_event: bool
    fields: Fields


class RecordJob(msgspec.Struct, tag="record"):
    """Find the parts of a record (see `found_record`)."""

    record_bytes: int
    has_output: bool


class RecordParts(msgspec.Struct):
    """What was found in a record; None if it is none."""

    found: FoundRecord | None
    output_bytes: int = 0
    """Size of the items of its output, which follow."""


class Refusal(msgspec.Struct):
    """An error of the request."""

    status: int
    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        return cls(error.http_status, error.message, error.param, error.code)

    def error(self) -> ApiError:
        kinds = {kind.http_status: kind for kind in (BadRequest, PayloadTooLarge)}
        return kinds.get(self.status, InternalError)(self.message, param=self.param, code=self.code)


class Found(msgspec.Struct):
    """What a body has, or why it is refused."""

    examined: Examined | None = None
    refusal: Refusal | None = None


class Wish(msgspec.Struct):
    """Measure the prompts of the last body, and rewrite it."""

    seed: int | None
    """Of the hashes; None: nothing more is wanted of the body."""
    changes: dict[str, bytes] = {}
    """Other values of fields, as JSON."""
    is_reduced: bool = False
    """Whether to keep only what engines of other makes get."""


class Measurements(msgspec.Struct):
    """`MeasuredPrompts`, whose sequences are 8-byte integers of this machine."""

    hashes: bytes
    segment_bytes: bytes
    text_bytes: int
    token_ids: int
    has_media: bool
    body_bytes: int | None
    """Size of the rewritten body, which follows; None: it is as it was."""

    @classmethod
    def of(cls, measured: MeasuredPrompts, body_bytes: int | None) -> Measurements:
        return cls(
            array("Q", measured.hashes).tobytes(),
            array("Q", measured.segment_bytes).tobytes(),
            measured.text_bytes,
            measured.token_ids,
            measured.has_media,
            body_bytes,
        )

    def measured(self) -> MeasuredPrompts:
        hashes, sizes = array("Q", self.hashes), array("Q", self.segment_bytes)
        return MeasuredPrompts(hashes, sizes, self.text_bytes, self.token_ids, self.has_media)


def frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


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
                *(sys.executable, "-P", "-m", "argosy_router.proxy.large_bodies"),
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
        from argosy_router.metrics import LARGE_BODIES  # here, because the process has no metrics

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


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer messages until `requests` ends."""

    def received(kind: Any) -> Any:
        length = requests.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return None
        return msgspec.msgpack.decode(requests.read(int.from_bytes(length, "big")), type=kind)

    def answer(message: msgspec.Struct, body: bytes = b"") -> None:
        answers.write(frame(message))
        answers.write(body)
        answers.flush()

    def read(job: BodyJob) -> None:
        body = requests.read(job.body_bytes)
        try:
            examined, prompts = examine(cast("RoutedEndpoint", job.endpoint), body, has_state=job.has_state)
        except ApiError as error:
            answer(Found(refusal=Refusal.of(error)))
            return
        except Exception:
            log.exception("a large request could not be read")
            answer(Found(refusal=Refusal.of(InternalError("internal error"))))
            return
        answer(Found(examined=examined))
        wish = received(Wish)
        if wish is not None and wish.seed is not None:
            rewritten = _rewritten(body, wish, job.endpoint)
            size = None if rewritten is body else len(rewritten)
            answer(Measurements.of(measure(prompts, wish.seed), size), b"" if size is None else rewritten)

    def read_record(job: RecordJob) -> None:
        record = requests.read(job.record_bytes)
        try:
            found, output = found_record(record, has_output=job.has_output)
        except ValueError:
            answer(RecordParts(None))
        else:
            answer(RecordParts(found, len(output)), output)

    while (job := received(BodyJob | ResponseJob | RecordJob)) is not None:
        if isinstance(job, BodyJob):
            read(job)
        elif isinstance(job, RecordJob):
            read_record(job)
        else:
            answer(found_response(requests.read(job.answer_bytes), job.is_event, job.fields))
        gc.collect()


def _rewritten(body: bytes, wish: Wish, endpoint: str) -> bytes:
    if wish.changes:
        body = with_fields(body, {name: msgspec.Raw(value) for name, value in wish.changes.items()})
    return keep_foreign_fields(body, endpoint) if wish.is_reduced else body


def main() -> int:
    # A router that drains still reads requests; this process ends after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return_freed_memory()
    gc.disable()  # a million values would be looked at again and again while they are decoded
    gc.freeze()
    serve(sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
