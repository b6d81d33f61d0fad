"""HTTP for mock engines: completions, and the routes that routers use to inspect a worker.

Owns framing and the shape of answers. Must not know when a completion is answered.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from prompts import MODEL
from telemetry_announcer import Announcer

from argosy_protocol.headers import TELEMETRY_CONTENT_TYPE, TELEMETRY_PATH

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"
TELEMETRY_HEAD = f"HTTP/1.1 200 OK\r\ncontent-type: {TELEMETRY_CONTENT_TYPE}\r\n\r\n".encode()
"""Head without a length: the telemetry stream lasts until its connection closes."""


def answer(body: object, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        + data
    )


def completion(text: str, finish: str | None, **fields: Any) -> dict[str, Any]:
    """Return the body of a completion, or of a stream's event, which has the same shape."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        **fields,
    }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def event(body: object) -> bytes:
    """Encode one event of a stream as an HTTP chunk."""
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


DONE = chunk(b"data: [DONE]\n\n")
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


class EngineConnection(asyncio.Protocol):
    """One connection to a mock engine.

    Heads are searched for what is needed rather than parsed. Without an announcer there is no telemetry, as with
    engines other than ours.
    """

    def __init__(self, announcer: Announcer | None) -> None:
        self._announcer = announcer
        self._buffer = b""

    def complete(self, body: bytes) -> None:
        """Answer a completion, now or later."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._announcer is not None:
            self._announcer.leave(self.transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            self._handle(head.split(b" ", 2)[1].decode(), body)

    def _handle(self, path: str, body: bytes) -> None:
        if path.endswith("completions"):
            self.complete(body)
        elif path.endswith("/models"):
            self.transport.write(MODELS)
        elif path == TELEMETRY_PATH and self._announcer is not None:
            self.transport.write(TELEMETRY_HEAD)
            self._announcer.greet(self.transport)
        elif path == "/health" or "info" in path or "load" in path:
            self.transport.write(INFO)
        else:
            self.transport.write(NOT_FOUND)
