"""The connection limit: which connections close to admit others, and what those over the limit are answered."""

from __future__ import annotations

import contextlib
import json
from typing import cast

import pytest

from argosy_router.config import ConfigError, ServerLimits
from argosy_router.http import limits as connection_limit
from argosy_router.http.limits import (
    GRACE_S,
    MAX_DEFAULT,
    MIN_DEFAULT,
    SPARE_DESCRIPTORS,
    ConnectionLimit,
    default_connections,
)
from argosy_router.http.server_connection import ServerConnection
from argosy_router.main import build_parser, config_of

from .fake_engine import FakeEngine
from .harness import DEADLINE_S, raw, rig
from .raw_requests import HEALTH, Gate, answer, ask, is_closed, keep, limited_to, request_bytes


async def test_a_surplus_connection_is_refused_without_affecting_others() -> None:
    async with limited_to(2) as (r, gate), raw(r.router) as a, raw(r.router) as b:
        await ask(r, a)
        await ask(r, b)
        async with raw(r.router) as (reader, writer):
            writer.write(request_bytes())
            status, headers, body = await answer(reader)
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
            assert headers["x-should-retry"] == "true"
            assert headers["x-request-id"]
            assert json.loads(body)["error"]["type"] == "service_unavailable"
            assert await is_closed(reader)
        assert len(r.engines[0].requests) == 2
        gate.opens.set()
        for reader, _ in (a, b):
            assert (await answer(reader))[0] == 200
        assert r.metric("refused_connections_total") == 1
        assert r.metric('requests_total{code="503",model=""}') == 1


async def test_a_client_that_leaves_makes_way_for_another() -> None:
    async with limited_to(1) as (r, gate):
        gate.opens.set()
        for _ in range(5):
            async with raw(r.router) as (reader, writer):
                writer.write(request_bytes())
                assert (await answer(reader))[0] == 200
            await r.until(lambda: not r.router.server.connections)
        assert r.metric("refused_connections_total") == 0


async def test_the_longest_idle_connection_is_closed_first() -> None:
    async with limited_to(3) as (r, gate), raw(r.router) as a, raw(r.router) as b, raw(r.router) as c:
        await keep(a)
        await keep(b)
        await ask(r, c)
        await keep(a)  # b idles longer now
        async with raw(r.router) as d:
            await keep(d)
            assert await is_closed(b[0])
            await keep(a)
            await ask(r, a)
            async with raw(r.router) as e:
                await ask(r, e)
                assert await is_closed(d[0])
                gate.opens.set()
                for reader, _ in (a, c, e):
                    assert (await answer(reader))[0] == 200
        assert r.metric("refused_connections_total") == 0


async def test_a_connection_with_a_running_request_is_not_closed() -> None:
    async with limited_to(1) as (r, gate), raw(r.router) as (reader, writer):
        await keep((reader, writer))
        data = request_bytes()
        writer.write(data[:-2])  # all but the end of the body
        (connection,) = r.router.server.connections
        await r.until(lambda: connection.is_busy)
        async with raw(r.router) as (other, asking):
            asking.write(data)
            assert (await answer(other))[0] == 503
        gate.opens.set()
        writer.write(data[-2:])
        assert (await answer(reader))[0] == 200


async def test_probes_are_answered_over_the_limit() -> None:
    async with limited_to(1) as (r, _), raw(r.router) as busy:
        await ask(r, busy)
        async with raw(r.router) as (reader, writer):
            writer.write(HEALTH)
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (200, "close")
            assert await is_closed(reader)


async def test_a_request_without_a_key_gets_401_over_the_limit() -> None:
    limits = ServerLimits(max_connections=1)
    async with rig([FakeEngine(script=Gate())], server=limits, api_keys=("k",)) as r:
        key = b"\r\nauthorization: Bearer k\r\n"
        async with raw(r.router) as (_, holding):
            holding.write(request_bytes().replace(b"\r\n", key, 1))
            await r.until(lambda: bool(r.engines[0].requests))
            async with raw(r.router) as (reader, writer):
                writer.write(request_bytes())
                assert (await answer(reader))[0] == 401


async def test_a_silent_connection_over_the_limit_is_closed() -> None:
    async with limited_to(1, surplus_timeout_s=0.01) as (r, _), raw(r.router) as busy:
        await ask(r, busy)
        async with raw(r.router) as (reader, _):
            assert await is_closed(reader)
        assert r.metric("refused_connections_total") == 1


async def test_surplus_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "MAX_SURPLUS", 1)
    async with limited_to(1) as (r, gate), raw(r.router) as busy:
        await ask(r, busy)
        async with raw(r.router) as (first, writer), raw(r.router) as (second, _):
            assert await is_closed(second), "it has no time to speak"
            writer.write(request_bytes())
            assert (await answer(first))[0] == 503
        gate.opens.set()
        assert (await answer(busy[0]))[0] == 200
        await r.until(lambda: len(r.router.server.connections) == 1)
        assert r.metric("refused_connections_total") == 2


class Kept:
    """A connection that the limit may displace."""

    def __init__(self, *, has_its_answer: bool = True) -> None:
        self._has_its_answer = has_its_answer

    def displace(self) -> bool:
        return self._has_its_answer


def test_a_connection_that_reads_its_answer_is_not_closed() -> None:
    limit = ConnectionLimit(2)
    slow, quick = (cast("ServerConnection", Kept(has_its_answer=value)) for value in (False, True))
    for connection in (slow, quick):
        assert limit.admit(0.0)
        limit.idle[connection] = None
    assert limit.admit(0.0), "for the quick one"
    assert not limit.idle, "the slow one is looked at again after its next request"
    assert not limit.admit(0.0)
    limit.release(quick, is_admitted=True)
    assert not limit.admit(0.0), "another connection was admitted in its place"
    limit.release(slow, is_admitted=True)
    assert limit.admit(0.0)


@pytest.mark.parametrize(
    ("open_files", "connections"),
    [(64, MIN_DEFAULT), (1024, (1024 - SPARE_DESCRIPTORS) // 2), (1 << 20, MAX_DEFAULT)],
)
def test_the_default_leaves_room_for_the_replicas_connections(open_files: int, connections: int) -> None:
    assert default_connections(open_files) == connections


@pytest.mark.parametrize("asked", ["0", "-1", "1000000000"])
def test_bounds_that_cannot_be_kept_are_refused(asked: str) -> None:
    flags = ["--replica", "http://a:1", f"--max-connections={asked}"]
    with pytest.raises(ConfigError, match="--max-connections"):
        config_of(build_parser().parse_args(flags), {})
    flags[-1] = "--max-connections=5"
    assert config_of(build_parser().parse_args(flags), {}).server.max_connections == 5


# connections that receive a body


class Receiving:
    address = ""

    def __init__(self) -> None:
        self.is_gone = False

    def displace(self) -> bool:
        self.is_gone = True
        return True


def receive(limit: ConnectionLimit, account: object, count: int, now: float) -> list[Receiving]:
    made = []
    for _ in range(count):
        connection = Receiving()
        assert limit.admit(now)
        limit.add_receiving(connection, account, now)
        made.append(connection)
    return made


def test_at_the_limit_the_account_with_most_unfinished_bodies_loses_its_oldest() -> None:
    limit = ConnectionLimit(100)
    mine, others = receive(limit, "a", 80, 0.0), receive(limit, "b", 20, 0.0)
    receive(limit, "c", 10, GRACE_S)
    assert [one.is_gone for one in mine] == [True] * 10 + [False] * 70
    assert not any(one.is_gone for one in others)


def test_an_account_keeps_its_share_of_unfinished_bodies() -> None:
    limit = ConnectionLimit(100)
    each = [receive(limit, account, 12, 0.0) for account in range(8)]
    for _ in range(4):
        assert limit.admit(0.0)
    assert not limit.admit(9.0)
    assert not any(one.is_gone for account in each for one in account)


def test_bodies_that_have_arrived_are_not_closed() -> None:
    limit = ConnectionLimit(100)
    made = receive(limit, "a", 100, 0.0)
    for connection in made[:95]:
        limit.remove_receiving(connection)
    assert not limit.admit(9.0)
    for connection in made:
        limit.release(connection, is_admitted=True)
    receive(limit, "a", 100, 10.0)
    assert not any(one.is_gone for one in made)


async def test_slow_bodies_of_one_key_keep_no_other_key_out() -> None:
    limits = ServerLimits(max_connections=64, surplus_timeout_s=DEADLINE_S)
    async with (
        rig([FakeEngine()], server=limits, api_keys=("k", "other")) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        body = request_bytes().replace(b"\r\n", b"\r\nauthorization: Bearer k\r\n", 1)[:-1]
        for _ in range(64):
            _, writer = await stack.enter_async_context(raw(r.router))
            writer.write(body)
        await r.until(lambda: sum(c.is_receiving for c in r.router.server.connections) == 64)
        for _ in range(3):
            async with raw(r.router) as (reader, writer):
                writer.write(request_bytes().replace(b"\r\n", b"\r\nauthorization: Bearer other\r\n", 1))
                assert (await answer(reader))[0] == 200
        assert r.metric("refused_connections_total") == 0
