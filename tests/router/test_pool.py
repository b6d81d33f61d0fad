"""The connection pool of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter

import pytest

from argosy_router.config import UpstreamLimits
from argosy_router.http.deadlines import STEPS_PER_TURN, TimerWheel
from argosy_router.http.upstream import (
    Collector,
    ConnectFailed,
    ConnectionPool,
    UpstreamConnection,
    UpstreamTls,
)

from .harness import DEADLINE_S


class Waiting:
    """Requests that wait for connections; notes in which turn of the event loop each gets one."""

    def __init__(self, count: int) -> None:
        self.turns: Counter[int] = Counter()
        self.failures: list[str] = []
        self.told = asyncio.Event()
        self._count = count
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn += 1
        if not self.told.is_set():
            self._loop.call_soon(self._begin_turn)

    def on_connected(self, connection: UpstreamConnection) -> None:
        self.turns[self._turn] += 1
        self._note()

    def on_connect_failed(self, error: ConnectFailed) -> None:
        self.failures.append(str(error))
        self._note()

    def _note(self) -> None:
        if self.turns.total() + len(self.failures) == self._count:
            self.told.set()


@pytest.mark.parametrize("is_removed", [False, True])
async def test_requests_that_get_new_connections_at_once_are_sent_in_turns(is_removed: bool) -> None:
    """A thousand, which waited for a replica that became ready, were sent in one turn of the event loop."""
    count = 6 * STEPS_PER_TURN
    with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
        wheel = TimerWheel(asyncio.get_running_loop())
        host, port = server.getsockname()
        pool = ConnectionPool(f"http://{host}:{port}", UpstreamLimits(), wheel, UpstreamTls())
        waiting = Waiting(count)
        for _ in range(count):
            pool.acquire(waiting)
        if is_removed:
            while not waiting.turns:  # noqa: ASYNC110
                await asyncio.sleep(0)
            pool.close()
        async with asyncio.timeout(DEADLINE_S):
            await waiting.told.wait()
        assert max(waiting.turns.values()) <= 2 * STEPS_PER_TURN, "our turns begin within those of the loop"
        assert set(waiting.failures) == ({"replica was removed"} if is_removed else set())
        for connection in list(pool.connections):
            connection.abort()
        pool.close()


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".b"])
async def test_a_host_that_cannot_be_one_fails_its_waiter(host: str) -> None:
    failed: asyncio.Future[ConnectFailed] = asyncio.get_running_loop().create_future()

    class QueuedRequest:
        def on_connected(self, connection: UpstreamConnection) -> None:
            raise AssertionError

        def on_connect_failed(self, error: ConnectFailed) -> None:
            failed.set_result(error)

    wheel = TimerWheel(asyncio.get_running_loop())
    pool = ConnectionPool(f"http://{host}:80", UpstreamLimits(), wheel, UpstreamTls())
    pool.acquire(QueuedRequest())
    assert "connect failed" in str(await asyncio.wait_for(failed, DEADLINE_S))
    pool.close()


@pytest.mark.parametrize("size", [1000, 32 << 20])
async def test_a_connection_is_used_again_only_if_the_replica_has_read_the_request(size: int) -> None:
    """One that answered without reading had all bodies of a connection kept in the router's memory, one behind the
    other, and counted nowhere."""
    left = asyncio.Event()

    async def answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        with contextlib.suppress(ConnectionError):
            await left.wait()
        writer.close()

    server = await asyncio.start_server(answer_at_once, "127.0.0.1", limit=2048)
    host, port = server.sockets[0].getsockname()
    wheel = TimerWheel(asyncio.get_running_loop())
    pool = ConnectionPool(f"http://{host}:{port}", UpstreamLimits(), wheel, UpstreamTls())
    kept: list[UpstreamConnection] = []
    try:
        connection = await pool.connect(kept.append)
        answered = Collector(1000)
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
        connection.send(answered, head, DEADLINE_S, body=b"x" * size)
        async with asyncio.timeout(DEADLINE_S):
            assert (await answered.done).body == b"{}"
        is_read = size < 2048
        assert (kept == [connection], connection.is_closed) == (is_read, not is_read)
    finally:
        connection.abort()
        pool.close()
        left.set()
        server.close()
        await server.wait_closed()
