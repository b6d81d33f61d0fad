"""A streaming completions client that uses little CPU, because it shares the cores with the server it measures.

It counts events in the raw bytes as they arrive and parses only the usage at the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Stream:
    """Measurements of one request. Times are seconds since it was sent."""

    arrivals: list[float] = field(default_factory=list)
    """Arrival times of the events with tokens; events that arrive together have the same time."""
    completion_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0]

    @property
    def itl(self) -> float:
        """Mean inter-token latency, correct also if a server sends several tokens in one event."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.completion_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Times between consecutive events."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.done: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.stream = Stream()
        self._tail = b""
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[Stream]:
        self._sent = time.perf_counter()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._sent
        # A marker may be split over two reads, so keep a tail. It starts after the last marker's first byte, so that
        # no marker counts twice.
        window = self._tail + data
        tokens = window.count(b'"text":')
        self.stream.arrivals += [now] * tokens
        cut = window.rfind(b'"text":')
        self._tail = window[max(cut + 1, len(window) - 2000) :]
        if b"data: [DONE]" in self._tail:
            self._finish()

    def _finish(self) -> None:
        if self.done.done():
            return
        usage = self._tail.rfind(b'"completion_tokens":')
        if usage < 0:
            self.done.set_exception(RuntimeError(f"no usage at the end of a stream: {self._tail[-300:]!r}"))
            return
        digits = self._tail[usage + len(b'"completion_tokens":') :].lstrip()
        self.stream.completion_tokens = int(digits.split(b",")[0].split(b"}")[0])
        self.done.set_result(self.stream)
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the server closed a stream: {self._tail[-300:]!r}"))


async def complete(url: str, model: str, prompt: list[int], max_tokens: int) -> Stream:
    """Send one greedy streamed completion of exactly `max_tokens` tokens.

    Raises:
        RuntimeError: the stream ended early, or its usage reports another number of tokens.
    """
    address = urlsplit(url)
    body = json.dumps({
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(_Connection, address.hostname, address.port)
    stream = await connection.send(head + body)
    if stream.completion_tokens != max_tokens:
        raise RuntimeError(f"{stream.completion_tokens} tokens instead of {max_tokens}")
    return stream


async def closed_loop(
    url: str, model: str, prompts: list[list[int]], max_tokens: int, concurrency: int
) -> tuple[list[Stream], float]:
    """Complete all prompts with `concurrency` requests in flight; returns the streams and the elapsed seconds."""
    waiting = iter(prompts)
    streams: list[Stream] = []

    async def worker() -> None:
        for prompt in waiting:
            streams.append(await complete(url, model, prompt, max_tokens))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return streams, time.perf_counter() - started
