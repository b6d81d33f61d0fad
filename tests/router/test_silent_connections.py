"""Connections without a complete request head keep nobody else out, on either port, with TLS or without."""

from __future__ import annotations

import asyncio
import contextlib
from ipaddress import ip_network

import pytest

from argosy_router.admin.server import MAX_SILENT
from argosy_router.config import ConfigError, ServerLimits
from argosy_router.http.limits import GRACE_S, AddressGroups, ConnectionLimit
from argosy_router.main import build_parser, config_of

from .fake_engine import FakeEngine
from .harness import DEADLINE_S, Rig, raw, rig
from .raw_requests import HEALTH, answer, ask, is_closed, keep, limited_to, request_bytes

KEY_LINE = b"\r\nauthorization: Bearer k\r\n"
HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-"
UNREAD_BODY = b"POST /health HTTP/1.1\r\nhost: a\r\ncontent-length: 9000\r\n\r\nx"
"""On a route that needs no key."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_many(stack: contextlib.AsyncExitStack, r: Rig, count: int, sent: bytes = b"") -> list[Streams]:
    """Connections that send this much and fall silent; returns when the router has them all."""
    streams = [await stack.enter_async_context(raw(r.router)) for _ in range(count)]
    for _, writer in streams:
        writer.write(sent)
    await r.until(lambda: len(r.router.server.connections) >= count)
    if sent:
        await r.until(lambda: sum(c.is_busy for c in r.router.server.connections) >= count)
    return streams


@pytest.mark.parametrize(
    "sent", [b"", HALF_A_HEAD, UNREAD_BODY], ids=["nothing", "half a head", "unread body"]
)
async def test_silent_connections_block_no_client(sent: bytes) -> None:
    limits = ServerLimits(max_connections=64, max_silent_per_address=64, surplus_timeout_s=DEADLINE_S)
    async with (
        rig([FakeEngine()], server=limits, api_keys=("k",)) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        await open_many(stack, r, 64, sent)
        for _ in range(3):
            async with raw(r.router) as (reader, writer):
                writer.write(request_bytes().replace(b"\r\n", KEY_LINE, 1))
                assert (await answer(reader))[0] == 200
        assert r.metric("refused_connections_total") == 0


async def test_the_oldest_gives_way_first_and_no_request_does() -> None:
    async with limited_to(4) as (r, gate), raw(r.router) as a, raw(r.router) as b:
        await ask(r, a)
        await ask(r, b)
        async with contextlib.AsyncExitStack() as stack:
            (first,) = await open_many(stack, r, 1, HALF_A_HEAD)
            second = await stack.enter_async_context(raw(r.router))
            await r.until(lambda: len(r.router.server.connections) == 4)
            async with raw(r.router) as c:
                await ask(r, c)
                assert await is_closed(first[0])
                async with raw(r.router) as d:
                    await ask(r, d)
                    assert await is_closed(second[0])
                    async with raw(r.router) as (reader, writer):
                        writer.write(request_bytes())
                        assert (await answer(reader))[0] == 503, "all others are answered"
                    gate.opens.set()
                    for reader, _ in (a, b, c, d):
                        assert (await answer(reader))[0] == 200


async def test_an_idle_connection_goes_before_one_that_has_just_come() -> None:
    async with limited_to(2) as (r, gate), raw(r.router) as kept, raw(r.router) as new:
        await keep(kept)
        await r.until(lambda: len(r.router.server.connections) == 2)
        async with raw(r.router) as c:
            await ask(r, c)
            assert await is_closed(kept[0])
            gate.opens.set()
            new[1].write(request_bytes())
            assert (await answer(new[0]))[0] == 200


async def test_a_whole_head_ends_the_silence() -> None:
    async with limited_to(1) as (r, gate), raw(r.router) as (reader, writer):
        data = request_bytes()
        writer.write(data[:20])
        await r.until(lambda: any(c.is_busy for c in r.router.server.connections))
        writer.write(data[20:-2])
        connection = next(iter(r.router.server.connections))
        await r.until(lambda: not connection.is_silent)
        async with raw(r.router) as (other, asking):
            asking.write(data)
            assert (await answer(other))[0] == 503
        gate.opens.set()
        writer.write(data[-2:])
        assert (await answer(reader))[0] == 200


# the bound per address


class Silent:
    """A connection that the limit may displace."""

    def __init__(self, address: str = "") -> None:
        self.address = address
        self.is_gone = False

    def displace(self) -> bool:
        self.is_gone = True
        return True


def fill(limit: ConnectionLimit, address: str, count: int, now: float) -> list[Silent]:
    made = []
    for _ in range(count):
        connection = Silent(address)
        assert limit.admit(now)
        limit.add_silent(connection, now)
        made.append(connection)
    return made


def gone(connections: list[Silent]) -> int:
    return sum(connection.is_gone for connection in connections)


def test_silent_connections_are_limited_per_address() -> None:
    limit = ConnectionLimit(100, silent_per_address=4)
    mine, theirs = fill(limit, "10.0.0.1", 4, 0.0), fill(limit, "10.0.0.2", 3, 0.0)
    later = fill(limit, "10.0.0.1", 2, GRACE_S + 1.0)
    assert [one.is_gone for one in mine] == [True, True, False, False], "the oldest"
    assert not gone(theirs)
    assert not gone(later)


def test_a_burst_of_one_address_is_let_in() -> None:
    limit = ConnectionLimit(1000, silent_per_address=4)
    burst = fill(limit, "10.0.0.1", 500, 0.0)
    assert not gone(burst), "clients open many connections at once, and speak a moment later"
    fill(limit, "10.0.0.1", 1, GRACE_S + 1.0)
    assert gone(burst) == 497


def test_connections_with_requests_do_not_count_as_silent() -> None:
    limit = ConnectionLimit(100, silent_per_address=2)
    spoken = fill(limit, "10.0.0.1", 50, 0.0)
    for connection in spoken:
        limit.remove_silent(connection)
    silent = fill(limit, "10.0.0.1", 2, 10.0)
    fill(limit, "10.0.0.2", 1, 20.0)
    assert not gone(spoken + silent)


def test_closed_connections_are_forgotten() -> None:
    limit = ConnectionLimit(100, silent_per_address=2)
    for connection in fill(limit, "10.0.0.1", 2, 0.0):
        limit.release(connection, is_admitted=True)
    assert not gone(fill(limit, "10.0.0.1", 2, 10.0))


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("192.168.7.1", ""),
        ("fd00::1", ""),
        ("", ""),
        ("/run/socket", ""),
    ],
)
def test_addresses_are_those_of_one_client(host: str, group: str) -> None:
    groups = AddressGroups((ip_network("192.168.0.0/16"), ip_network("fd00::/8")))
    assert groups.of(host) == group


def test_trusted_proxies_are_networks() -> None:
    flags = ["--replica", "http://a:1", "--trusted-proxy", "10.0.0.0/8", "--trusted-proxy", "::1"]
    limits = config_of(build_parser().parse_args(flags), {}).server
    assert limits.trusted_proxies == ("10.0.0.0/8", "::1")
    with pytest.raises(ConfigError, match="--trusted-proxy"):
        config_of(build_parser().parse_args([*flags, "--trusted-proxy", "lb.example"]), {})


# the admin port


async def connect_admin(stack: contextlib.AsyncExitStack, r: Rig) -> Streams:
    host, _, port = r.router.admin_url.rpartition("//")[2].rpartition(":")
    streams = await asyncio.open_connection(host, int(port))
    stack.callback(lambda: streams[1].transport.abort())
    return streams


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: "])
async def test_silent_connections_keep_no_probe_from_the_admin_port(sent: bytes) -> None:
    """The kubelet asks there whether the router lives."""
    async with rig([FakeEngine()], admin_port=0) as r, contextlib.AsyncExitStack() as stack:
        for _ in range(300):
            _, writer = await connect_admin(stack, r)
            writer.write(sent)
        for _ in range(3):
            reader, writer = await connect_admin(stack, r)
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("after", [b"", b"x", b"x" * 8999], ids=["nothing", "a byte", "the rest"])
async def test_connections_that_have_their_answer_keep_no_probe_from_the_admin_port(after: bytes) -> None:
    """A byte of the body behind an answer stopped uvicorn's timer: such connections stayed for ever, without a key."""
    async with rig([FakeEngine()], admin_port=0) as r, contextlib.AsyncExitStack() as stack:
        for _ in range(300):
            reader, writer = await connect_admin(stack, r)
            writer.write(UNREAD_BODY)
            assert (await answer(reader))[0] in (405, 503)
            writer.write(after)
        for _ in range(3):
            reader, writer = await connect_admin(stack, r)
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200
        assert r.router.admin is not None
        assert len(r.router.admin.server_state.connections) <= MAX_SILENT + 3


@pytest.mark.parametrize("after", [b"x", b"x" * 8999], ids=["a byte", "the rest"])
async def test_the_admin_port_keeps_no_connection_that_has_its_answer(
    monkeypatch: pytest.MonkeyPatch, after: bytes
) -> None:
    from argosy_router.admin import server as admin_connections

    monkeypatch.setattr(admin_connections, "REQUEST_TIMEOUT_S", 0.01)
    async with rig([FakeEngine()], admin_port=0) as r, contextlib.AsyncExitStack() as stack:
        reader, writer = await connect_admin(stack, r)
        writer.write(UNREAD_BODY)
        assert (await answer(reader))[0] == 405
        writer.write(after)
        assert await is_closed(reader)


async def test_the_admin_port_waits_so_long_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from argosy_router.admin import server as admin_connections

    monkeypatch.setattr(admin_connections, "READ_TIMEOUT_S", 0.01)
    async with rig([FakeEngine()], admin_port=0) as r, contextlib.AsyncExitStack() as stack:
        _, writer = await connect_admin(stack, r)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /main.js HTTP/1.1\r\nhost: a\r\n\r\n" * 2000)
        assert r.router.admin is not None
        connections = r.router.admin.server_state.connections
        await r.until(lambda: len(connections) == 1)
        await r.until(lambda: not connections)


async def test_the_admin_port_waits_so_long_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from argosy_router.admin import server as admin_connections

    monkeypatch.setattr(admin_connections, "REQUEST_TIMEOUT_S", 0.01)
    async with rig([FakeEngine()], admin_port=0) as r, contextlib.AsyncExitStack() as stack:
        reader, writer = await connect_admin(stack, r)
        writer.write(b"GET /health HTTP/1.1\r\nhost: ")
        assert (await answer(reader))[0] == 408
        assert await is_closed(reader)
