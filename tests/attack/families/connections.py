"""Connections that send nothing, too slowly, too much, or something other than HTTP, to the router and an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import cast

from ..fleet import ATTACKER_KEY, ENGINE_KEY, MAX_CONNECTIONS, MODEL
from ..target import COMPLETIONS, Attack, Target
from ..wire import HOST, raw, status_of

AUTH = f"authorization: Bearer {ATTACKER_KEY}\r\n".encode()
JSON = b"content-type: application/json\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
MALFORMED: tuple[bytes, ...] = (
    b"GET /\r\n",
    b"GET /health\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n" + AUTH + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n" + AUTH + b"\r\n",
    b"GET /v1/models HTTP/9.9\r\nhost: a\r\n\r\n",
    b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-a: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON
    + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON + b"content-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON + b"content-length: 5, 6\r\n\r\nabcdef",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON
    + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON + b"content-length: 99999999999\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx: a\x00b\r\n\r\n",
)  # fmt: skip
"""Malformed requests. None may be answered with a server error."""


@contextlib.asynccontextmanager
async def held(port: int, count: int, first: bytes = b"") -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Hold open up to `count` connections that have sent only `first`."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.write(first)
                writers.append(writer)
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


async def silent(target: Target) -> None:
    """Open more connections than the router accepts and send nothing."""
    async with held(target.fleet.port, MAX_CONNECTIONS + 100) as writers:
        target.outcomes["held"] += len(writers)
        await asyncio.sleep(target.seconds_left)


async def slow_heads(target: Target) -> None:
    """Send one byte of the request head per second, on as many connections as the router accepts."""
    async with held(
        target.fleet.port, MAX_CONNECTIONS, b"POST /v1/completions HTTP/1.1\r\nx-slow: "
    ) as writers:
        target.outcomes["held"] += len(writers)
        while not target.is_over:
            await asyncio.sleep(1.0)
            for writer in writers:
                if not writer.is_closing():
                    writer.write(b"a")


async def slow_bodies(target: Target) -> None:
    """Send the bodies of authenticated requests slowly, on half of the connections that the router accepts."""
    first = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON + b"content-length: 1000000\r\n\r\n{"
    )
    async with held(target.fleet.port, MAX_CONNECTIONS // 2, first) as writers:
        target.outcomes["held"] += len(writers)
        while not target.is_over:
            await asyncio.sleep(1.0)
            for writer in writers:
                if not writer.is_closing():
                    writer.write(b" ")


async def deaf_clients(target: Target) -> None:
    """Ask for long streams with large events, and never read."""
    fields = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4}
    body = json.dumps({"model": MODEL, **fields}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON
    request += b"content-length: %d\r\n\r\n" % len(body) + body
    async with held(target.fleet.port, 6, request) as writers:
        for writer in writers:
            cast(asyncio.ReadTransport, writer.transport).pause_reading()
        target.outcomes["held"] += len(writers)
        await asyncio.sleep(target.seconds_left)


async def malformed(target: Target) -> None:
    async def once(number: int) -> None:
        received = await raw(target.fleet.port, MALFORMED[number % len(MALFORMED)], listen_s=1.0)
        target.saw(status_of(received), received)

    await target.volley(once, in_flight=6)


async def malformed_at_engine(target: Target) -> None:
    """Send malformed requests to an engine's own port, which only routers should reach."""
    port = target.fleet.engines[1].port
    key = f"authorization: Bearer {ENGINE_KEY}\r\n".encode()

    async def once(number: int) -> None:
        received = await raw(port, MALFORMED[number % len(MALFORMED)].replace(AUTH, key), listen_s=1.0)
        target.saw(status_of(received), received)

    await target.volley(once, in_flight=6)


async def silent_at_engine(target: Target) -> None:
    port = target.fleet.engines[2].port
    async with held(port, 300) as quiet, held(port, 100, b"POST /v1/completions HTTP/1.1\r\nx: ") as slow:
        target.outcomes["held"] += len(quiet) + len(slow)
        while not target.is_over:
            await asyncio.sleep(1.0)
            for writer in slow:
                if not writer.is_closing():
                    writer.write(b"a")


async def pipelined(target: Target) -> None:
    """Write many requests to one connection at once."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + AUTH + JSON
    request = head + b"content-length: %d\r\n\r\n" % len(BODY) + BODY

    async def once(number: int) -> None:
        received = await raw(target.fleet.port, request * 30, listen_s=2.0)
        target.saw(status_of(received), received)

    await target.volley(once, in_flight=4, most=20)


async def no_key(target: Target) -> None:
    """Send requests without a key or with a wrong one, some with large bodies."""
    refused = frozenset({401, 403, 404, 413})

    async def once(number: int) -> None:
        key = ("", "sk-wrong", "x" * 8000)[number % 3]
        await target.ask(COMPLETIONS, b" " * (number % 2 * 1_000_000) + BODY, key=key, allowed=refused)

    await target.volley(once, in_flight=16, most=600)


ATTACKS = (
    Attack("silent connections", silent),
    Attack("slow heads", slow_heads),
    Attack("slow bodies", slow_bodies),
    Attack("clients that never read", deaf_clients),
    Attack("malformed requests", malformed),
    Attack("malformed requests at an engine", malformed_at_engine),
    Attack("silent connections at an engine", silent_at_engine),
    Attack("pipelined requests", pipelined),
    Attack("requests without a key", no_key),
)
