"""Open-loop client: sends streamed completions at given times, whether or not earlier ones are answered.

Owns connections and the measurements of each stream. Must not know what prompts mean. Latencies count from the time at
which a request was due, so that a client that falls behind does not hide delays (coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import httptools
from overhead import HEAD
from prompts import MODEL
from shared_prefix_load import Arrival

PATIENCE_S = 300.0
"""A request that has no complete answer after this time counts as an error."""
START_S = 0.1
"""Time between the call of `send` and the load's time zero."""
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class Answer:
    """Outcome of one request. Only complete answers, without `error`, have figures."""

    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class Client(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end(ConnectionError("connection lost"))

    async def ask(self, body: bytes, due: float) -> Answer:
        """Send one request and read its stream.

        Args:
            due: time from which the latency counts, on `time.perf_counter`'s clock.

        Raises:
            ConnectionError: the connection was lost before the answer was complete.
            ValueError: the answer is not a complete stream of a completion.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._first_token = 0.0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(HEAD % len(body) + body)
        await self._answered
        status = self._parser.get_status_code()
        if status != 200:
            raise ValueError(f"status {status}")
        events = bytes(self._body).split(b"\n\n")
        if _DONE not in events:
            raise ValueError("the stream ended early")
        last = json.loads(events[events.index(_DONE) - 1].removeprefix(b"data: "))
        usage = last.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Answer(self._first_token - due, usage.get("prompt_tokens", 0), cached)

    def abort(self) -> None:
        self.is_open = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ValueError(str(error)))

    def on_body(self, data: bytes) -> None:
        self._body += data
        if (
            not self._first_token and b'"text"' in self._body
        ):  # skips comments, which routers send while a request is queued
            self._first_token = time.perf_counter()

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            if error is None:
                self._answered.set_result(None)
            else:
                self._answered.set_exception(error)


class OpenLoop:
    """A client of the server at `port`, which keeps its connections for the next load.

    Args:
        max_tokens: length of an answer, unless `ask` gives another.
    """

    def __init__(self, port: int, max_tokens: int) -> None:
        self._port = port
        self._max_tokens = max_tokens
        self._idle: list[Client] = []

    async def send(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Send all requests at their times; returns the answers in the order of the arrivals."""
        start = time.perf_counter() + START_S
        return await asyncio.gather(*(self.ask(arrival.prompt, start + arrival.at_s) for arrival in arrivals))

    async def ask(self, prompt: str, due: float, max_tokens: int = 0) -> Answer:
        """Send one prompt when it is due, on `time.perf_counter`'s clock."""
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": max_tokens or self._max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        await asyncio.sleep(due - time.perf_counter())
        client = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                client = await self._client()
                answer = await client.ask(body, due)
        except (OSError, ValueError, TimeoutError) as error:
            if client is not None:
                client.abort()
            return Answer(error=f"{type(error).__name__}: {error}")
        self._idle.append(client)
        return answer

    async def _client(self) -> Client:
        while self._idle:
            client = self._idle.pop()
            if client.is_open:
                return client
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Client, "127.0.0.1", self._port))[1]
