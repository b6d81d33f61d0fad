"""Size limits of the engine's HTTP protocol, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from argosy_http.bounded_protocol import MAX_HEAD_BYTES, MAX_HEADERS, BoundedProtocol

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
BIG = b"a" * MAX_HEAD_BYTES


@asynccontextmanager
async def connection(
    has_body: asyncio.Event | None = None, application: Any = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To a server that answers with the length of the body; `has_body` tells when it has seen some."""

    async def sized(scope: Any, receive: Any, send: Any) -> None:
        size = 0
        while (message := await receive())["type"] == "http.request":
            size += len(message["body"])
            if has_body is not None:
                has_body.set()
            if not message["more_body"]:
                break
        body = str(size).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(application or sized, http=BoundedProtocol, lifespan="off", log_level="critical")
    config.load()
    loop, state = asyncio.get_running_loop(), ServerState()
    server = await loop.create_server(
        lambda: BoundedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()
        await server.wait_closed()


async def ask(request: bytes) -> tuple[int, bytes]:
    """Status and body; nothing follows a refusal."""
    async with connection() as (reader, writer):
        for start in range(0, len(request), 4096):
            writer.write(request[start : start + 4096])
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(size)


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"x: " + BIG,
        HEAD + b"x: " + BIG + b"\r\n\r\n",
        HEAD + b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(70)),
        HEAD + b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(70)) + b"\r\n",
        b"GET /" + BIG + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /" + BIG,
        CHUNKED + b"0\r\n" + b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(70)),
    ],
)
async def test_large_heads_and_trailers_are_refused(request_bytes: bytes) -> None:
    status, body = await ask(request_bytes)
    assert status == 431
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_trailer_without_end_is_refused() -> None:
    has_body = asyncio.Event()
    async with connection(has_body) as (reader, writer):
        writer.write(CHUNKED)
        await has_body.wait()
        writer.write(b"0\r\nx: " + BIG)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    ("request_bytes", "size"),
    [
        (HEAD + b"x: " + BIG[: MAX_HEAD_BYTES // 2] + b"\r\ncontent-length: 0\r\n\r\n", 0),
        (HEAD + b"content-length: %d\r\n\r\n" % (4 * MAX_HEAD_BYTES) + 4 * BIG, 4 * MAX_HEAD_BYTES),
        (
            HEAD
            + b"transfer-encoding: chunked\r\n\r\n"
            + (b"14\r\n" + b"a" * 20 + b"\r\n") * 4000
            + b"0\r\n\r\n",
            80_000,
        ),
    ],
)
async def test_bodies_do_not_count(request_bytes: bytes, size: int) -> None:
    assert await ask(request_bytes) == (200, str(size).encode())


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_only_http11_gets_a_body_in_chunks(version: bytes) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with connection(application=application) as (reader, writer):
        writer.write(b"GET / HTTP/%b\r\nhost: x\r\nconnection: close\r\n\r\n" % version)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head) == (version == b"1.1")
    assert body == (b"onetwo" if version == b"1.0" else b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


WAITS = HEAD + b"expect: 100-continue\r\ncontent-length: 50\r\n\r\n"
"""A client that sends its body of 50 bytes when it is told to continue, or after a second or so without an answer."""
NEXT = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer before anything of the body is read."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def test_a_request_that_is_refused_before_its_body_does_not_swallow_the_next_one() -> None:
    """Nobody knows whether what follows the answer is that body, or another request."""
    async with connection(application=refuse) as (reader, writer):
        writer.write(WAITS)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in head
        writer.write(NEXT)
        assert await reader.read() == b""


@pytest.mark.parametrize("body", [b"content-length: 0\r\n\r\n", b"content-length: 2\r\n\r\n{}", b"\r\n"])
async def test_a_request_whose_body_is_there_keeps_its_connection_though_it_is_refused(body: bytes) -> None:
    async with connection(application=refuse) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"expect: 100-continue\r\n" + body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401 ")
            assert b"connection" not in head


async def test_a_request_that_may_continue_keeps_its_connection() -> None:
    async with connection() as (reader, writer):
        for _ in range(2):
            writer.write(WAITS)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"x" * 50)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"connection" not in head
            assert await reader.readexactly(2) == b"50"


async def test_http10_is_not_told_to_continue() -> None:
    async with connection() as (reader, writer):
        writer.write(WAITS.replace(b"/1.1", b"/1.0") + b"x" * 50)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c\r\n"
"""What Java's HTTP client sends with a request until a server has answered."""


@pytest.mark.parametrize("body", [b"content-length: 3\r\n\r\nabc", CHUNKED.removeprefix(HEAD) + b"0\r\n\r\n"])
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_an_offer_of_another_protocol_is_ignored(body: bytes, step: int) -> None:
    looked = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    last = HEAD + b"upgrade: h2c\r\nconnection: close\r\n" + body
    data = HEAD + OFFER + body + looked + HEAD + OFFER + body + last
    async with connection() as (reader, writer):
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await asyncio.sleep(0)
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"HTTP/1.1") == 4
    assert [answer[:1] for answer in answers.split(b"\r\n\r\n")[1:]] == [b"3", b"0", b"3", b"3"]


@pytest.mark.parametrize(("version", "more"), [(b"1.1", b"connection: close\r\n"), (b"1.0", b"")])
async def test_an_offer_may_be_in_the_last_request_of_a_connection(version: bytes, more: bytes) -> None:
    request = HEAD.replace(b"1.1", version) + OFFER + more + b"content-length: 3\r\n\r\nabc"
    assert await ask(request) == (200, b"3")


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + OFFER + b"host: y\r\n\r\n",
        HEAD + OFFER + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_what_offers_another_protocol_is_checked_all_the_same(request_bytes: bytes) -> None:
    status, body = await ask(request_bytes)
    assert status == 400
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_requests_of_one_connection_count_alone() -> None:
    one = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + BIG[: MAX_HEAD_BYTES // 3] + b"\r\n\r\n"
    async with connection() as (reader, writer):
        writer.write(one * 5)
        for _ in range(5):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(1) == b"0"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhOST: a\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", 200),
        (b"GET / HTTP/0.9\r\nhost: a\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (HEAD + b"content-length: 1\r\ncontent-length: 1\r\n\r\na", 400),
        (HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
    ],
)
async def test_requests_have_one_host_and_a_version_that_we_speak(request_bytes: bytes, status: int) -> None:
    answered, body = await ask(request_bytes)
    assert answered == status
    if status == 400:
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_trailer_is_no_second_host() -> None:
    assert await ask(CHUNKED + b"0\r\nhost: x\r\n\r\n") == (200, b"3")


@pytest.mark.parametrize("offer", [b"", OFFER])
async def test_a_trailer_is_no_header(offer: bytes) -> None:
    """Trailers may be what a proxy would not let pass as headers (RFC 9110, 6.5.1)."""
    names: list[list[bytes]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        names.append([name for name, _ in scope["headers"]])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    head = HEAD + offer + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    async with connection(application=application) as (reader, writer):
        writer.write(head + b"3\r\nabc\r\n0\r\nauthorization: Bearer key\r\nx-other: 1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" in names[0]
    assert not {b"authorization", b"x-other"} & {*names[0]}


@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431), (300, 431)])
async def test_headers_are_counted(extra: int, status: int) -> None:
    num_headers = MAX_HEADERS - 2 + extra  # besides host and content-length
    request = HEAD + b"content-length: 0\r\n" + b"x: y\r\n" * num_headers + b"\r\n"
    assert (await ask(request))[0] == status
