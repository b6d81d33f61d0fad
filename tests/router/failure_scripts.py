"""Scripts of engines that fail: each is what a `FakeEngine` does with one request."""

from __future__ import annotations

from .fake_engine import DONE, Connection, Received, answer_normally, event


async def reset_at_once(connection: Connection, request: Received) -> None:
    connection.die()


async def refuse(connection: Connection, request: Received) -> None:
    connection.answer(503, b'{"error":{"message":"full"}}')


async def reject(connection: Connection, request: Received) -> None:
    connection.answer(400, b'{"error":{"message":"no"}}')


async def nonsense(connection: Connection, request: Received) -> None:
    connection.send(b"nonsense\r\n\r\n")


async def die_in_the_body(connection: Connection, request: Received) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    await connection.writer.drain()
    connection.die()


async def die_in_the_stream(connection: Connection, request: Received) -> None:
    connection.begin_stream()
    connection.chunk(event("hel"))
    await connection.writer.drain()
    connection.die()


async def empty_stream(connection: Connection, request: Received) -> None:
    connection.begin_stream()
    connection.end_stream()


async def only_done(connection: Connection, request: Received) -> None:
    connection.begin_stream()
    connection.chunk(DONE)
    connection.end_stream()


async def never_answer(connection: Connection, request: Received) -> None:
    await connection.gone()


async def stall_in_the_stream(connection: Connection, request: Received) -> None:
    connection.begin_stream()
    connection.chunk(event("hel"))
    await connection.gone()


SCRIPTS = [
    *(answer_normally, reset_at_once, refuse, reject, nonsense, die_in_the_body, die_in_the_stream),
    *(empty_stream, only_done),
]
