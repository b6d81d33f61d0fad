"""A scriptable engine on real sockets: what a replica can do to a router, by script.

It parses requests by hand, so that a mistake in the router's own parser cannot hide here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from argosy_protocol.telemetry import (
    Frame,
    Hello,
    Load,
    Snapshot,
    Stored,
    encode_frame,
    pack_u32,
    pack_u64,
)

MODEL = "tiny"


@dataclass
class Received:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Connection:
    """The engine's end of one connection, for scripts."""

    engine: FakeEngine
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def answer(self, status: int, body: bytes, headers: str = "content-type: application/json\r\n") -> None:
        self.send(f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body)

    def begin_stream(self, headers: str = "") -> None:
        self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        self.send(headers.encode() + b"transfer-encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.send(b"0\r\n\r\n")

    def die(self) -> None:
        """Resets the connection, as a killed process does."""
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Returns when the router has closed its end."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


Script = Callable[[Connection, Received], Awaitable[None]]


def completion(text: str = "hello", prompt_tokens: int = 10, cached: int = 0) -> bytes:
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                    "text": text,
                }
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": 1,
                "total_tokens": prompt_tokens + 1,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
    ).encode()


def event(text: str, finish: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
NORMAL_STREAM = event("hel") + event("lo") + event("", "stop") + DONE
"""The events of `answer_normally`."""


async def answer_normally(connection: Connection, request: Received) -> None:
    """Says hello, streamed if asked to."""
    if request.json.get("stream"):
        connection.begin_stream()
        for text in ("hel", "lo"):
            connection.chunk(event(text))
        connection.chunk(event("", "stop"))
        connection.chunk(DONE)
        connection.end_stream()
    else:
        connection.answer(200, completion())


@dataclass
class FakeEngine:
    """One replica. `script` decides about generation requests; the other routes answer by the attributes."""

    model: str = MODEL
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    key: str = ""
    keys: frozenset[str] = frozenset()
    """All keys that it accepts, if it accepts several."""
    script: Script = answer_normally
    has_telemetry: bool = True
    hello: dict[str, Any] = field(default_factory=dict)
    health: int = 200
    metrics: bytes | None = None
    """What `/metrics` answers; None: 404."""
    refused: int = 0
    """Requests without a key that it accepts."""
    requests: list[Received] = field(default_factory=list)
    telemetry: list[asyncio.StreamWriter] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    epoch: int = 0
    resident: dict[int, int] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.epoch += 1
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: close the listener and reset all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self.writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # telemetry

    def announce(self, frame: Frame) -> None:
        for writer in self.telemetry:
            writer.write(encode_frame(frame))

    def announce_raw(self, data: bytes) -> None:
        for writer in self.telemetry:
            writer.write(data)

    def store(self, chunks: dict[int, int]) -> None:
        self.resident |= chunks
        self.announce(Stored(hashes=pack_u64(list(chunks)), tokens=pack_u32(list(chunks.values()))))

    def cut_telemetry(self) -> None:
        for writer in list(self.telemetry):
            writer.transport.abort()

    # connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.writers.add(writer)
        self.connections += 1
        try:
            await self._serve(Connection(self, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.writers.discard(writer)
            if writer in self.telemetry:
                self.telemetry.remove(writer)
            writer.transport.abort()

    async def _serve(self, connection: Connection) -> None:
        while True:
            head = (await connection.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip("\r\n").split("\r\n")
            method, path, _ = first.split(" ")
            headers = {}
            for line in lines:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = await connection.reader.readexactly(int(headers.get("content-length", "0")))
            await self.handle(connection, Received(method, path, headers, body))
            await connection.writer.drain()

    async def handle(self, connection: Connection, request: Received) -> None:
        accepted = self.keys or ({self.key} if self.key else set())
        if (
            accepted
            and request.path != "/health"
            and request.headers.get("authorization", "").removeprefix("Bearer ") not in accepted
        ):
            self.refused += 1
            connection.answer(401, b'{"error":{"message":"no"}}')
        elif request.path in (
            "/v1/chat/completions",
            "/v1/chat/completions/batch",
            "/v1/completions",
            "/v1/embeddings",
            "/classify",
            "/pooling",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/v1/messages",
            "/v1/responses",
            "/v1/responses/input_tokens",
            "/v1/messages/count_tokens",
            "/tokenize",
            "/detokenize",
        ):
            self.requests.append(request)
            await self.script(connection, request)
        elif request.path == "/v1/models":
            cards = [{"id": name, "object": "model", "created": 1} for name in (self.model, *self.aliases)]
            cards += [{"id": name, "object": "model", "parent": self.model} for name in self.adapters]
            connection.answer(200, json.dumps({"object": "list", "data": cards}).encode())
        elif request.path == "/health":
            connection.answer(self.health, b"{}")
        elif request.path == "/metrics" and self.metrics is not None:
            connection.answer(200, self.metrics, "content-type: text/plain; version=0.0.4\r\n")
        elif request.path == "/internal/telemetry" and self.has_telemetry:
            await self.stream_telemetry(connection)
        else:
            connection.answer(404, b"{}")

    async def stream_telemetry(self, connection: Connection) -> None:
        hello = Hello(
            **{
                "epoch": f"{self.port}-{self.epoch}",
                "model": self.model,
                "model_fingerprint": "f",
                "block_size": 16,
                "max_model_len": 4096,
                "max_num_seqs": 64,
                "kv_cache_tokens": 65536,
                **self.hello,
            }
        )
        # Telemetry ends with the connection, like a response without a length.
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.argosy.telemetry\r\n\r\n")
        snapshot = Snapshot(
            hashes=pack_u64(list(self.resident)),
            tokens=pack_u32(list(self.resident.values())),
            first=True,
            last=True,
        )
        for frame in (hello, snapshot, Load(core_step_age_s=0.0)):
            connection.send(encode_frame(frame))
        self.telemetry.append(connection.writer)
        await connection.gone()
        raise ConnectionResetError
