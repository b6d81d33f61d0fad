"""Deadlines of the engine's HTTP protocol, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from argosy_batch import program
from argosy_http.bounded_protocol import GRACE_S, BoundedProtocol, HttpLimits

HEADERS_S, BODY_S, RATE, KEEP_ALIVE_S = 10.0, 30.0, 100, 75
STALL_S = 60.0
LINGER_S, UNWANTED_BYTES = 2.0, 200_000
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


class Clock:
    """An event loop whose timers fire when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Timer] = []

    def create_task(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, callback)
        self._timers.append(timer)
        return timer

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self._timers if timer.at <= end and not timer.is_cancelled]:
            first = min(due, key=lambda timer: timer.at)
            self._timers.remove(first)
            self.now = first.at
            first.callback()
            await settle()
        self.now = end


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Wire(asyncio.Transport):
    """The server's end of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False
        """Whether our side has ended."""
        self.is_gone = False
        self.is_paused = False
        self.unread = 0
        """Bytes in the write buffer."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        self.is_closed = True
        self.is_gone = not self.unread

    def abort(self) -> None:
        self.is_closed = self.is_gone = True

    def is_closing(self) -> bool:
        return self.is_gone or (self.is_closed and bool(self.unread))

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Connection:
    """A client's connection to an application that reads a body and answers when the test says so."""

    def __init__(self, protocol: type[BoundedProtocol] | None = None) -> None:
        self.clock, self.wire = Clock(), Wire()
        self.may_read, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_read.set()
        self.may_answer.set()
        self.messages: list[str] = []
        config = uvicorn.Config(
            self._application,
            interface="asgi3",
            lifespan="off",
            log_level="critical",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        self.protocol = (protocol or Protocol)(config, ServerState(), {}, self.clock)  # type: ignore[arg-type]
        self.protocol.connection_made(self.wire)

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            await self.may_read.wait()
            message = await receive()
            self.messages.append(message["type"])
            more = message.get("more_body", False)
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def send(self, data: bytes) -> None:
        self.protocol.data_received(data)
        await settle()

    @property
    def status(self) -> int | None:
        """Of the last answer."""
        return int(self.wire.written.rpartition(b"HTTP/1.1 ")[2][:3]) if self.wire.written else None


class Protocol(BoundedProtocol):
    limits = HttpLimits(
        header_timeout_s=HEADERS_S,
        body_timeout_s=BODY_S,
        min_body_rate=RATE,
        write_stall_s=STALL_S,
        linger_s=LINGER_S,
        unwanted_bytes=UNWANTED_BYTES,
    )


async def settle() -> None:
    """Lets the application run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def client() -> AsyncIterator[Connection]:
    connection = Connection()
    yield connection
    connection.may_answer.set()
    connection.may_read.set()
    connection.protocol.connection_lost(None)
    await settle()


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: b\r\n", b"GET /\r\n"])
async def test_headers_that_do_not_end_are_refused(client: Connection, sent: bytes) -> None:
    if sent:
        await client.send(sent)
    await client.clock.advance(HEADERS_S - 0.1)
    assert not client.wire.is_closed
    await client.clock.advance(GRACE_S + 0.2)
    assert (client.status, client.wire.is_closed) == (408, True)


async def test_a_trickle_of_headers_does_not_extend_the_deadline(client: Connection) -> None:
    await client.send(HEAD)
    for number in range(11):
        if not client.wire.is_closed:
            await client.send(b"x-%d: y\r\n" % number)
            await client.clock.advance(HEADERS_S / 10)
    assert (client.status, client.wire.is_closed) == (408, True)


@pytest.mark.parametrize(
    "framing", [b"content-length: 100000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n186a0\r\n"]
)
@pytest.mark.parametrize("per_second", [0, RATE // 2])
async def test_a_slow_body_is_refused_and_its_application_told(
    client: Connection, framing: bytes, per_second: int
) -> None:
    await client.send(HEAD + framing)
    for _ in range(int(BODY_S) + 1):
        if not client.wire.is_closed and per_second:
            await client.send(b"x" * per_second)
        await client.clock.advance(1.0)
    assert (client.status, client.wire.is_closed) == (408, True)
    assert client.messages[-1] == "http.disconnect"


async def test_a_body_at_the_rate_may_take_its_time(client: Connection) -> None:
    await client.send(HEAD + b"content-length: %d\r\n\r\n" % (RATE * 200))
    for _ in range(200):
        await client.send(b"x" * RATE)
        await client.clock.advance(1.0)
    assert (client.status, client.wire.is_closed) == (200, False)


async def test_deadlines_do_not_run_while_the_server_pauses_reading(client: Connection) -> None:
    client.may_read.clear()
    await client.send(HEAD + b"content-length: 200000\r\n\r\n" + b"x" * 100_000)
    assert client.wire.is_paused
    await client.clock.advance(10 * BODY_S)
    assert not client.wire.is_closed
    client.may_read.set()
    await settle()
    await client.send(b"x" * 100_000)
    assert client.status == 200


async def test_data_that_arrived_while_the_loop_was_blocked_is_read_before_deadlines(
    client: Connection,
) -> None:
    await client.send(HEAD)
    await client.clock.advance(HEADERS_S)  # the timer fires, and only then the rest is read
    await client.send(b"content-length: 2\r\n\r\n")
    await client.clock.advance(BODY_S)
    await client.send(b"hi")
    await client.clock.advance(1)
    assert (client.status, client.wire.is_closed) == (200, False)


@pytest.mark.parametrize("behind", [b"", b"\r\n"])
async def test_an_answer_may_take_its_time(client: Connection, behind: bytes) -> None:
    client.may_answer.clear()
    await client.send(HEAD + b"content-length: 2\r\n\r\nhi" + behind)
    await client.clock.advance(3600)
    assert not client.wire.is_closed
    client.may_answer.set()
    await settle()
    assert client.status == 200


async def test_an_idle_connection_is_closed_without_a_word(client: Connection) -> None:
    await client.send(HEAD + b"content-length: 0\r\n\r\n")
    assert client.status == 200
    answered = client.wire.written
    await client.clock.advance(KEEP_ALIVE_S - 1)
    assert not client.wire.is_closed
    await client.clock.advance(2)
    assert client.wire.is_closed
    assert client.wire.written == answered


async def test_a_client_that_does_not_read_its_answer_is_cut(
    client: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[None] = []
    monkeypatch.setattr(Protocol, "on_slow_client", staticmethod(lambda: cut.append(None)))
    await client.send(HEAD + b"content-length: 0\r\n\r\n")
    for _ in range(3):  # it reads slowly, but it does
        client.protocol.pause_writing()
        await client.clock.advance(STALL_S - 1)
        client.protocol.resume_writing()
        await client.clock.advance(2)
        await client.send(HEAD + b"content-length: 0\r\n\r\n")
        assert not client.wire.is_closed
    client.protocol.pause_writing()
    await client.clock.advance(STALL_S - 1)
    assert (client.wire.is_gone, len(cut)) == (False, 0)
    await client.clock.advance(2)
    assert (client.wire.is_gone, len(cut)) == (True, 1)


async def test_what_a_client_left_unread_when_its_connection_ended_is_dropped(client: Connection) -> None:
    await client.send(HEAD + b"content-length: 0\r\n\r\n")
    client.wire.unread = 10
    await client.clock.advance(KEEP_ALIVE_S + 1)
    assert client.wire.is_closed
    assert not client.wire.is_gone, "it may still read"
    await client.clock.advance(STALL_S)
    assert client.wire.is_gone


async def test_a_second_request_has_a_deadline_of_its_own(client: Connection) -> None:
    await client.send(HEAD + b"content-length: 0\r\n\r\n")
    await client.clock.advance(KEEP_ALIVE_S - 1)
    await client.send(b"GET / HT")
    await client.clock.advance(HEADERS_S - 1)
    assert not client.wire.is_closed
    await client.clock.advance(2)
    assert (client.status, client.wire.is_closed) == (408, True)


@pytest.mark.parametrize("comes", [False, True])
async def test_an_unread_body_does_not_keep_the_connection(client: Connection, comes: bool) -> None:
    """The answer came before the body did, and its bytes end uvicorn's timer for idle connections."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    client.protocol.app = refuse  # type: ignore[assignment]
    await client.send(HEAD + b"content-length: 1000\r\n\r\nx")
    assert client.status == 401
    if comes:
        await client.send(b"x" * 999)
    await client.clock.advance(KEEP_ALIVE_S - 1 if comes else BODY_S - 1)
    assert not client.wire.is_closed
    await client.clock.advance(2)
    assert client.wire.is_closed


async def test_of_too_many_silent_connections_the_one_that_was_so_for_longest_is_cut() -> None:
    """Those whose request is being answered stay, and so does one that has come before and asked again."""
    limited = Protocol.for_server(limits=replace(Protocol.limits, max_silent=3))
    answered = Connection(limited)
    answered.may_answer.clear()
    await answered.send(HEAD + b"content-length: 0\r\n\r\n")
    first, left, idle = (Connection(limited) for _ in range(3))
    await first.send(HEAD + b"content-length: 0\r\n\r\n")
    assert list(limited.silent) == [left.protocol, idle.protocol, first.protocol]
    last = Connection(limited)
    assert [each.wire.is_gone for each in (answered, first, left, idle, last)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    answered.may_answer.set()
    await settle()
    assert [each.wire.is_gone for each in (first, answered, idle, last)] == [False, False, True, False]
    answered.protocol.pause_writing()
    for each in (answered, first, left, idle, last):
        each.protocol.connection_lost(None)
    assert not limited.silent


REFUSED = {
    "no HTTP": b"hello\r\n\r\n",
    "two hosts": HEAD + b"host: y\r\n\r\n",
    "too many headers": HEAD + b"a: b\r\n" * 1000,
    "broken chunks": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("refused", REFUSED)
async def test_a_refused_client_may_continue_to_send_for_a_moment(client: Connection, refused: str) -> None:
    """A connection closed with input unread is reset, and the reset overtakes the answer."""
    await client.send(REFUSED[refused])
    assert client.wire.written.count(b"HTTP/1.1 4") == 1
    assert client.wire.is_closed
    for _ in range(10):
        assert not client.wire.is_gone
        await client.send(b"x" * 1000)
        await client.clock.advance(LINGER_S / 10)
    await client.clock.advance(0.1)
    assert client.wire.is_gone
    assert client.wire.written.count(b"HTTP/1.1 4") == 1


async def test_a_refused_client_may_not_send_without_end(client: Connection) -> None:
    await client.send(REFUSED["no HTTP"])
    await client.send(b"x" * UNWANTED_BYTES)
    assert not client.wire.is_gone
    await client.send(b"x")
    assert client.wire.is_gone


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """An application that does not wait for the body."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
async def test_a_body_may_continue_after_an_answer_that_ends_the_connection(
    client: Connection, version: str
) -> None:
    client.protocol.app = refuse  # type: ignore[assignment]
    head = HEAD.replace(b"HTTP/1.1", version.encode())
    await client.send(head + b"connection: close\r\ncontent-length: 100000\r\n\r\nx")
    assert (client.status, client.wire.is_closed, client.wire.is_gone) == (413, True, False)
    await client.send(b"x" * 99_999)
    await client.clock.advance(LINGER_S + 0.1)
    assert client.wire.is_gone


@pytest.mark.parametrize("sends", ["fast", "slowly"])
async def test_a_body_without_end_is_cut_after_its_answer_and_not_answered_again(
    client: Connection, sends: str
) -> None:
    client.protocol.app = refuse  # type: ignore[assignment]
    await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
    per_second = UNWANTED_BYTES // 20 if sends == "fast" else 2 * RATE
    for second in range(int(2 * BODY_S + LINGER_S) + 3):
        if not client.wire.is_gone:
            await client.send(b"%x\r\n%b\r\n" % (per_second, b"x" * per_second))
        await client.clock.advance(1.0)
        assert second > 0 or not client.wire.is_closed
    assert client.wire.is_gone
    assert client.wire.written.count(b"HTTP/1.1") == 1


async def test_reading_resumes_after_a_pause_for_an_application_that_reads_nothing(
    client: Connection,
) -> None:
    client.may_read.clear()
    await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n20000\r\n" + b"x" * 0x20000)
    assert client.wire.is_paused
    await client.send(b"no chunk")
    assert (client.status, client.wire.is_paused, client.wire.is_gone) == (400, False, False)


async def test_a_connection_is_closed_at_once_where_nothing_is_owed(client: Connection) -> None:
    await client.send(HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n")
    assert (client.status, client.wire.is_gone) == (200, True)


async def test_an_unread_body_s_end_does_not_end_the_answer_behind_it(client: Connection) -> None:
    """The end and the next request come in one read."""
    application = client.protocol.app

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        client.protocol.app = application
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    client.protocol.app = refuse  # type: ignore[assignment]
    await client.send(HEAD + b"content-length: 3\r\n\r\nx")
    assert client.status == 401
    client.may_answer.clear()
    await client.send(b"xx" + HEAD + b"content-length: 0\r\n\r\n")
    await client.clock.advance(KEEP_ALIVE_S + 1)
    assert not client.wire.is_closed
    client.may_answer.set()
    await settle()
    assert client.status == 200


@pytest.mark.parametrize("sent", [1000, 100_000])
async def test_requests_that_are_sent_ahead_are_bounded(client: Connection, sent: int) -> None:
    client.may_answer.clear()
    await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * sent)
    assert len(client.protocol.pipeline) <= 16
    client.may_answer.set()
    for _ in range(20):
        await settle()
    assert client.wire.written.count(b" 200 OK") == 17
    assert client.wire.is_closed


@pytest.mark.parametrize("behind", [b"zz\r\n", b""])
async def test_what_follows_a_request_does_not_break_into_its_answer(
    client: Connection, behind: bytes
) -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await client.may_answer.wait()
        await send({"type": "http.response.body", "body": b"last"})

    client.protocol.app = stream  # type: ignore[assignment]
    client.may_answer.clear()
    await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + behind)
    client.protocol.flow.resume_reading()  # as the application does when it watches
    await client.clock.advance(60.0)
    client.may_answer.set()
    await settle()
    assert client.wire.written.endswith(b"5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n")
    assert client.wire.is_closed


async def test_uploads_and_downloads_of_batches_do_not_give_way_to_connections_that_say_nothing() -> None:
    class Batch(BoundedProtocol):
        limits = replace(program.LIMITS, max_silent=3)

    limited = Batch.for_server()
    upload, download = Connection(limited), Connection(limited)
    await upload.send(HEAD + b"content-length: 1000\r\n\r\nx")
    download.may_answer.clear()
    await download.send(HEAD + b"content-length: 0\r\n\r\n")
    download.protocol.pause_writing()
    silent = [Connection(limited) for _ in range(4)]
    assert [each.wire.is_gone for each in (upload, download, *silent)] == [False] * 2 + [True] + [False] * 3
    for each in (upload, download, *silent):
        each.may_answer.set()
        each.protocol.connection_lost(None)
    await settle()
    assert not limited.silent


async def test_a_body_of_tiny_chunks_is_refused(client: Connection) -> None:
    """Each costs as much as a large one, also behind an answer."""
    await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 4000)
    assert not client.wire.is_closed
    for _ in range(100):
        await client.send(b"100\r\n" + b"a" * 256 + b"\r\n")
    assert not client.wire.is_closed
    await client.send(b"1\r\na\r\n" * 200)
    assert (client.status, client.wire.is_closed) == (400, True)
