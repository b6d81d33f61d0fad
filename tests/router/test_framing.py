"""HTTP framing: what the router accepts as a request, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import socket

import pytest

from argosy_router.config import ServerLimits
from argosy_router.http.messages import Phase
from argosy_router.observability.lines import LineWriter

from .fake_engine import Connection, FakeEngine, Received
from .framing_corpus import BODY, GOOD, HEAD, HOST, LENGTH, OFFER, REFUSED, SMUGGLED, TYPE
from .harness import DEADLINE_S, Rig, StoppedClock, chat, raw, read_all, read_until, rig, until
from .server_in_memory import ours


async def exchange(r: Rig, data: bytes) -> bytes:
    """Everything the router answers to `data`, until it closes."""
    async with raw(r.router) as (reader, writer):
        writer.write(data)
        return await read_all(reader)


async def begin(r: Rig, data: bytes, phase: Phase) -> bytes:
    """Everything the router answers to the beginning of a request when its time is up."""
    async with raw(r.router) as (reader, writer):
        writer.write(data)
        await until(lambda: phase in [each.reader.phase for each in r.router.server.connections])
        limits = r.router.server.limits
        await r.pass_time(limits.header_timeout_s if phase is Phase.HEAD else limits.body_timeout_s)
        return await read_all(reader)


def wrongly_refused(answers: dict[str, bytes]) -> dict[str, bytes]:
    """Answers that are not one 400 of OpenAI's shape: nothing after the refused message may be answered."""
    return {
        name: answer
        for name, answer in answers.items()
        if not answer.startswith(b"HTTP/1.1 400 ")
        or answer.count(b"HTTP/1.1") != 1
        or json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] != "invalid_request_error"
    }


def test_ambiguous_framing_is_refused() -> None:
    """In memory, where the whole corpus is a matter of milliseconds."""
    heard = {name: ours([data]) for name, data in REFUSED.items()}
    assert wrongly_refused({name: answer for name, (_, answer) in heard.items()}) == {}
    assert {name: messages for name, (messages, _) in heard.items() if messages} == {}


async def test_ambiguous_framing_is_refused_and_the_connection_closed() -> None:
    """Over sockets, one of each kind: two framings, a length, a chunk, no HTTP, and a method of proxies."""
    names = (
        "content-length and transfer-encoding",
        "signed length",
        "chunk longer than its size",
        "TLS hello",
        "CONNECT",
    )
    async with rig([FakeEngine()]) as r:
        answers = {name: await exchange(r, REFUSED[name]) for name in names}
        assert wrongly_refused(answers) == {}
        assert not r.engines[0].requests


LIMITS = ServerLimits(max_header_bytes=2048, max_headers=20, max_body_bytes=1000)
TOO_LARGE = {
    "one long header": (HEAD + HOST + b"X: " + b"a" * 5000 + b"\r\n\r\n", 431),
    "an endless header": (HEAD + HOST + b"X: " + b"a" * 5000, 431),
    "an endless target": (b"GET /" + b"a" * 5000, 431),
    "many headers": (HEAD + HOST + b"".join(b"X-%d: a\r\n" % n for n in range(30)) + b"\r\n", 431),
    "declared body": (HEAD + HOST + TYPE + b"Content-Length: 1001\r\n\r\n", 413),
    "chunked body": (
        HEAD
        + HOST
        + TYPE
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"100\r\n"
        + b"a" * 256
        + b"\r\n"
        + b"3e9\r\n"
        + b"a" * 1001,
        413,
    ),
    "trailers": (
        HEAD + HOST + TYPE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 400,
        431,
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_sizes_are_bounded(name: str) -> None:
    data, status = TOO_LARGE[name]
    async with rig([FakeEngine()], server=LIMITS) as r:
        answer = await exchange(r, data)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("sent", "phase"),
    [(HEAD + b"Host:", Phase.HEAD), (HEAD + HOST + TYPE + LENGTH + b"\r\n" + BODY[:5], Phase.BODY)],
)
async def test_slow_requests_time_out(sent: bytes, phase: Phase) -> None:
    async with rig([FakeEngine()], clock=StoppedClock()) as r:
        assert (await begin(r, sent, phase)).startswith(b"HTTP/1.1 408 ")


TRICKLES = {
    "head": (HEAD + b"Host: a", ServerLimits(header_timeout_s=0.3)),
    "body": (
        HEAD + HOST + TYPE + b"Content-Length: 100000\r\n\r\n",
        ServerLimits(body_timeout_s=0.3, min_body_rate=10_000),
    ),
}


@pytest.mark.parametrize("part", TRICKLES)
async def test_trickled_bytes_do_not_extend_the_deadline(part: str) -> None:
    begun, limits = TRICKLES[part]
    async with (
        rig([FakeEngine()], server=limits, clock=StoppedClock()) as r,
        raw(r.router) as (reader, writer),
        asyncio.timeout(DEADLINE_S),
    ):
        writer.write(begun)
        answering = asyncio.create_task(reader.readline())
        for _ in range(12):
            writer.write(b"a")
            await r.pass_time(0.03)
        assert (await answering).startswith(b"HTTP/1.1 408 ")


async def test_idle_connections_are_closed_silently() -> None:
    async with rig([FakeEngine()], clock=StoppedClock()) as r, raw(r.router) as (reader, writer):
        writer.write(SMUGGLED)
        answer = await reader.readline()
        await r.pass_time(ServerLimits().keep_alive_s)
        answer += await read_all(reader)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1") == 1


async def test_a_slow_reader_is_timed_like_others_afterwards() -> None:
    size = 900_000

    async def large(connection: Connection, _: Received) -> None:
        connection.answer(200, b"x" * size)

    limits = ServerLimits(write_buffer_bytes=1024)
    async with (
        rig([FakeEngine(script=large)], server=limits, clock=StoppedClock()) as r,
        raw(r.router) as (reader, writer),
    ):
        await until(lambda: bool(r.router.server.connections))
        (connection,) = r.router.server.connections
        for end, buffer in ((writer.transport, socket.SO_RCVBUF), (connection.transport, socket.SO_SNDBUF)):
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, buffer, 32768)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GOOD)
        await until(lambda: connection.is_behind)
        await until(lambda: connection.request is None)  # answered, though not read
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        await read_until(reader, lambda data: len(data.partition(b"\r\n\r\n")[2]) >= size)
        await r.pass_time(limits.keep_alive_s)
        assert await read_all(reader) == b"", "then it is closed as idle, instead of never"


async def test_refusals_of_the_wire_are_accounted_for() -> None:
    reader, writer = os.pipe()
    cases = [REFUSED[name] for name in ("two hosts", "TLS hello")]
    cases.append(HEAD + HOST + TYPE + b"X-Request-Id: mine\r\nContent-Length: 999999999\r\n\r\n")
    late = HEAD + HOST + TYPE + LENGTH + b"\r\n" + BODY[:5]
    written_by = LineWriter(writer)
    async with rig([FakeEngine()], clock=StoppedClock(), access_log=True, stderr=written_by) as r:
        answers = [await exchange(r, data) for data in cases]
        answers.append(await begin(r, late, Phase.BODY))
        ids = []
        for answer in answers:
            ids.append(answer.lower().partition(b"\r\nx-request-id: ")[2].partition(b"\r\n")[0].decode())
        for status, number in ((400, 2), (413, 1), (408, 1)):
            assert r.metric(f'requests_total{{code="{status}",model=""}}') == number
    written_by.close(DEADLINE_S)
    os.close(writer)
    with os.fdopen(reader) as lines:
        logged = [line.split()[1:3] for line in lines]
    assert logged == [[f"request={i}", f"status={s}"] for i, s in zip(ids, (400, 400, 413, 408), strict=True)]
    assert ids[2] == "mine"
    assert len(set(ids)) == 4


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_requests_may_arrive_in_any_pieces(step: int) -> None:
    async with rig([FakeEngine()]) as r, raw(r.router) as (reader, writer):
        for start in range(0, len(GOOD), step):
            writer.write(GOOD[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


async def test_chunked_request_bodies_are_accepted() -> None:
    chunked = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\nX-Trailer: dropped\r\n\r\n" % (
        5,
        BODY[:5],
        len(BODY) - 5,
        BODY[5:],
    )
    async with rig([FakeEngine()]) as r, raw(r.router) as (reader, writer):
        writer.write(HEAD + HOST + TYPE + b"Transfer-Encoding: chunked\r\n\r\n" + chunked)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        assert r.engines[0].requests[0].body == BODY
        assert "x-trailer" not in r.engines[0].requests[0].headers


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize("body", [LENGTH + b"\r\n" + BODY, CHUNKED])
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_an_offer_of_another_protocol_is_ignored(body: bytes, step: int) -> None:
    offered = HEAD + HOST + OFFER + TYPE + body
    looked = SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
    last = SMUGGLED.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\nConnection: close\r\n\r\n")
    data = offered + looked + offered + GOOD + last
    async with rig([FakeEngine()]) as r, raw(r.router) as (reader, writer):
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await asyncio.sleep(0)
        answer = await read_all(reader)
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"HTTP/1.1") == 5
        assert [request.body for request in r.engines[0].requests] == [BODY] * 3
        assert not {"upgrade", "http2-settings"} & set(r.engines[0].requests[0].headers)


@pytest.mark.parametrize(("version", "more"), [(b"1.1", b"Connection: close\r\n"), (b"1.0", b"")])
async def test_an_offer_may_be_in_the_last_request_of_a_connection(version: bytes, more: bytes) -> None:
    head = HEAD.replace(b"1.1", version)
    async with rig([FakeEngine()]) as r:
        answer = await exchange(r, head + HOST + OFFER + TYPE + more + LENGTH + b"\r\n" + BODY)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert [request.body for request in r.engines[0].requests] == [BODY]


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t "])
async def test_spaces_around_a_value_do_not_belong_to_it(space: bytes) -> None:
    key = b"Authorization:" + space + b"Bearer k" + space + b"\r\n"
    length = LENGTH.removesuffix(b"\r\n").replace(b": ", b":" + space) + space + b"\r\n"
    async with rig([FakeEngine()], api_keys=("k",)) as r:
        answer = await exchange(r, HEAD + HOST + TYPE + key + length + b"Connection: close\r\n\r\n" + BODY)
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with rig([FakeEngine()]) as r:
        last = b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        answer = await exchange(r, SMUGGLED + GOOD + GOOD + last)
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"HTTP/1.1") == 4
        assert answer.endswith(b'{"version":"0.1.0"}')


@pytest.mark.parametrize(("number", "answered"), [(5, 6), (200, 1)])
async def test_bytes_sent_ahead_are_bounded(number: int, answered: int) -> None:
    release = asyncio.Event()

    async def wait(connection: Connection, _: Received) -> None:
        await release.wait()
        connection.answer(200, b"{}")

    limits = ServerLimits(max_held_bytes=1000)
    async with (
        rig([FakeEngine(script=wait)], server=limits, clock=StoppedClock()) as r,
        raw(r.router) as (reader, writer),
    ):
        writer.write(GOOD)
        await until(lambda: bool(r.engines[0].requests))
        (connection,) = r.router.server.connections
        writer.write(SMUGGLED * number)
        await until(lambda: connection.held_bytes == number * len(SMUGGLED) or connection.is_discarding)
        release.set()
        answers = await read_until(reader, lambda data: data.count(b"HTTP/1.1 200") >= answered)
        await r.pass_time(limits.keep_alive_s)
        answers += await read_all(reader)
        assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1") == answered
        assert (b"connection: close" in answers) == (answered == 1)


async def test_bytes_that_come_with_a_request_are_bounded_as_those_behind_it() -> None:
    """Of one read any number was held for as long as the request was answered, and counted nowhere."""
    release = asyncio.Event()

    async def wait(connection: Connection, _: Received) -> None:
        await release.wait()
        connection.answer(200, b"{}")

    limits = ServerLimits(max_held_bytes=1000)
    async with (
        rig([FakeEngine(script=wait)], server=limits, clock=StoppedClock()) as r,
        raw(r.router) as (reader, writer),
    ):
        writer.write(GOOD + SMUGGLED * 1000)
        await until(lambda: bool(r.engines[0].requests))
        (connection,) = r.router.server.connections
        assert connection.held_bytes == 0
        assert connection.is_discarding
        release.set()
        await read_until(reader, lambda data: data.count(b"HTTP/1.1 200") == 1)


async def test_a_client_that_leaves_is_noticed_whatever_it_sent_ahead() -> None:
    gone = asyncio.Event()

    async def endless(connection: Connection, _: Received) -> None:
        await connection.gone()
        gone.set()

    async with rig([FakeEngine(script=endless)]) as r, raw(r.router) as (_, writer):
        writer.write(GOOD)
        await until(lambda: bool(r.engines[0].requests))
        writer.write(b"x" * 300_000)
        writer.close()
        await asyncio.wait_for(gone.wait(), DEADLINE_S)


async def test_expect_continue() -> None:
    async with rig([FakeEngine()]) as r, raw(r.router) as (reader, writer):
        writer.write(HEAD + HOST + TYPE + LENGTH + b"Expect: 100-continue\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


async def test_http10_is_not_told_to_continue() -> None:
    async with rig([FakeEngine()]) as r, raw(r.router) as (reader, writer):
        writer.write(HEAD.replace(b"1.1", b"1.0") + TYPE + LENGTH + b"Expect: 100-continue\r\n\r\n")
        await until(lambda: any(each.is_busy for each in r.router.server.connections))
        writer.write(BODY)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


async def test_a_request_that_is_refused_before_its_body_does_not_swallow_the_next_one() -> None:
    async with rig([FakeEngine()], api_keys=("k",)) as r, raw(r.router) as (reader, writer):
        writer.write(HEAD + HOST + TYPE + LENGTH + b"Expect: 100-continue\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close\r\n" in head
        writer.write(GOOD)
        assert b"HTTP/1.1" not in await reader.read()


async def test_http10_gets_a_plain_body_and_a_close() -> None:
    body = json.dumps(chat(stream=True)).encode()
    async with rig([FakeEngine()]) as r:
        head = HEAD.replace(b"1.1", b"1.0") + TYPE + b"Content-Length: %d\r\n\r\n" % len(body)
        answer = await exchange(r, head + body)
        assert b"transfer-encoding" not in answer
        assert b"connection: close\r\n" in answer
        assert answer.endswith(b"data: [DONE]\n\n")


async def test_head_has_no_body() -> None:
    async with rig([FakeEngine()]) as r:
        answer = await exchange(r, b"HEAD /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\n")
