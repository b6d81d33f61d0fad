"""Heads and trailers at the ports whose HTTP is uvicorn's: whoever reaches them needs no key to send one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from argosy_batch import program
from argosy_batch.config import BatchConfig
from argosy_http.bounded_protocol import BoundedProtocol
from argosy_protocol.errors import BadRequest
from argosy_protocol.response_history import referenced_responses
from argosy_protocol.responses import decode_responses_request
from argosy_router.admin.server import AdminServer
from argosy_router.proxy.answer_tokens import without_progress

PIECE = 64 * 1024
SENT = 12 << 20


class Wire(asyncio.Transport):
    """A transport that takes everything."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.9", 1), "sockname": ("10.0.0.1", 1)})
        self.aborted = False

    def write(self, data: Any) -> None: ...

    def close(self) -> None:
        self.aborted = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def application(scope: Any, receive: Any, send: Any) -> None: ...


ADMIN = AdminServer(Starlette(), "127.0.0.1", 0).config.http_protocol_class
BATCH = BoundedProtocol.for_server(limits=program.LIMITS)


def headers() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nhost: a\r\n"
    while True:
        yield b"a:\r\n" * (PIECE // 4)


def target() -> Iterator[bytes]:
    yield b"GET /"
    while True:
        yield b"a" * PIECE


def value() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nhost: a\r\nb: "
    while True:
        yield b"x" * PIECE


@pytest.mark.parametrize("pieces", [headers, target, value])
@pytest.mark.parametrize("connection", [ADMIN, BATCH], ids=["admin", "batch"])
async def test_a_head_without_an_end_is_cut(
    connection: type[BoundedProtocol], pieces: Callable[[], Iterator[bytes]]
) -> None:
    config = uvicorn.Config(application, log_config=None, ws="none", lifespan="off")
    config.load()
    protocol = connection(config=config, server_state=ServerState(), app_state={})
    wire = Wire()
    protocol.connection_made(wire)
    sent = 0
    for piece in pieces():
        if wire.aborted or sent > SENT:
            break
        protocol.data_received(piece)
        sent += len(piece)
    assert wire.aborted
    assert sent <= 3 * PIECE
    assert len(getattr(protocol, "headers", None) or ()) <= 100
    protocol.connection_lost(None)


async def test_connections_that_say_nothing_leave_room_for_those_that_do(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MAX_CONNECTIONS", 64)
    monkeypatch.setattr(program, "LIMITS", replace(program.LIMITS, max_silent=16))
    serving = program.BatchProgram(BatchConfig(port=0, storage=str(tmp_path), fleet_key=b"k" * 32))
    async with serving.serving():
        silent = [await asyncio.open_connection("127.0.0.1", serving.port) for _ in range(64)]
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        finally:
            for _, each in silent:
                each.close()


def cpu_s(call: Callable[[], object]) -> float:
    def once() -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    return min(once() for _ in range(5))


def test_references_to_many_responses_are_counted_once_each() -> None:
    """CPU times are compared: 4,000 of them held the event loop for a tenth of a second, whatever the bound says."""

    def refused_s(number: int) -> float:
        items = [{"type": "item_reference", "id": f"m_{i:x}_0"} for i in range(number)]
        request = decode_responses_request(msgspec.json.encode({"model": "m", "input": items}))

        def refused() -> None:
            with pytest.raises(BadRequest, match="more than"):
                referenced_responses(request)

        return cpu_s(refused)

    assert refused_s(4000) < 9 * refused_s(1000)


@pytest.mark.parametrize("end", [b"}}\n\n", b"\n\n"])
def test_a_usage_full_of_braces_is_searched_for_a_usage_s_length(end: bytes) -> None:
    """CPU times are compared: 4 MB took 200 ms, and 330 MB of memory, for each event."""
    event = b'data: {"choices":[{}],"usage":{' + b"{}" * 2_000_000 + end
    text = b"a" * len(event)
    search_s = cpu_s(lambda: text.count(b"\n\n"))
    assert cpu_s(lambda: without_progress(event)) < 100 * search_s
