"""Engines that answer at once, so that only the router's own cost is measured.

    python bench/router/mock_engine.py PORT[,PORT...] [EVENTS]

Answers /v1/completions with one JSON object or a stream of EVENTS events, and the routes by which routers look at a
worker. All ports live in one process.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

MODEL = "tiny"


def event(text: str) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(body: object, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        + data
    )


def completion(events: int) -> bytes:
    return answer(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "text": " hello" * events, "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": events, "total_tokens": 10 + events},
        }
    )


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
MODELS = answer(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "bench"}]}
)
INFO = answer(
    {
        "model_path": MODEL,
        "served_model_name": MODEL,
        "tokenizer_path": MODEL,
        "is_generation": True,
        "dp_size": 1,
    }
)
NOT_FOUND = answer({}, "404 Not Found")


class Engine(asyncio.Protocol):
    """One connection; requests are small enough to be searched, not parsed."""

    def __init__(self, events: int) -> None:
        self._pieces = [chunk(event(" hello"))] * events + [chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
        self._completion = completion(events)
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            self._handle(head.split(b" ", 2)[1], body)

    def _handle(self, path: bytes, body: bytes) -> None:
        write = self._transport.write  # type: ignore[attr-defined]
        if path.endswith(b"completions"):
            if b'"stream":true' in body[-200:].replace(b" ", b""):
                self._task = asyncio.ensure_future(self._stream(write))
            else:
                write(self._completion)
        elif path.endswith(b"/models"):
            write(MODELS)
        elif path == b"/health" or b"info" in path or b"load" in path:
            write(INFO)
        else:
            write(NOT_FOUND)

    async def _stream(self, write) -> None:  # type: ignore[no-untyped-def]
        write(STREAM_HEAD)
        for piece in self._pieces:
            write(piece)
            await asyncio.sleep(0)


async def main() -> None:
    events = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    loop = asyncio.get_running_loop()
    for port in sys.argv[1].split(","):
        await loop.create_server(lambda: Engine(events), "127.0.0.1", int(port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
