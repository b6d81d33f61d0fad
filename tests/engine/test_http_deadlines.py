"""How long a client may take for a request: the engine's HTTP protocol on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from argosy_engine.api.http_protocol import GRACE_S, BoundedProtocol, HttpLimits

HEADERS_S, BODY_S, RATE, KEEP_ALIVE_S = 10.0, 30.0, 100, 75
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
        self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Connection:
    """A client's connection to an application that reads a body and answers when told."""

    def __init__(self) -> None:
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
        self.protocol = Protocol(config, ServerState(), {}, self.clock)  # type: ignore[arg-type]
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
    limits = HttpLimits(header_timeout_s=HEADERS_S, body_timeout_s=BODY_S, min_body_rate=RATE)


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


async def test_nobody_is_late_while_it_is_us_who_do_not_read(client: Connection) -> None:
    client.may_read.clear()
    await client.send(HEAD + b"content-length: 200000\r\n\r\n" + b"x" * 100_000)
    assert client.wire.is_paused
    await client.clock.advance(10 * BODY_S)
    assert not client.wire.is_closed
    client.may_read.set()
    await settle()
    await client.send(b"x" * 100_000)
    assert client.status == 200


async def test_what_came_while_the_loop_stood_still_is_read_before_anybody_is_late(
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


async def test_a_second_request_has_a_deadline_of_its_own(client: Connection) -> None:
    await client.send(HEAD + b"content-length: 0\r\n\r\n")
    await client.clock.advance(KEEP_ALIVE_S - 1)
    await client.send(b"GET / HT")
    await client.clock.advance(HEADERS_S - 1)
    assert not client.wire.is_closed
    await client.clock.advance(2)
    assert (client.status, client.wire.is_closed) == (408, True)


async def test_a_body_that_nobody_wants_does_not_keep_the_connection(client: Connection) -> None:
    """The answer came before the body did."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    client.protocol.app = refuse  # type: ignore[assignment]
    await client.send(HEAD + b"content-length: 1000\r\n\r\nx")
    assert client.status == 401
    await client.clock.advance(BODY_S + 1)
    assert client.wire.is_closed
