"""An OpenAI endpoint on this machine without a model, whose answers a test chooses, for tests of clients under load.

It runs in a thread with a loop of its own, keeps connections alive, and keeps what it was asked.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Question:
    """A request. Names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    connection: int
    """Number of its connection, from 0."""


@dataclass(frozen=True)
class Events:
    """An answer in pieces, each of which is written at once."""

    pieces: Sequence[bytes]
    is_whole: bool = True
    """False closes the connection behind the last piece, before the answer's end."""


@dataclass(frozen=True)
class Document:
    """An answer in one piece of JSON."""

    value: Any
    status: int = 200
    closes: bool = False
    """Close the connection behind it, without saying so."""


Answer = Events | Document


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def completion_events(question: Question, usage: bool = True) -> Events:
    """Answer a completion or a chat with as many tokens as it asks for, one in an event."""
    is_chat = "messages" in question.body
    count = question.body.get("max_completion_tokens" if is_chat else "max_tokens")
    assert isinstance(count, int)
    tokens = [f"t{number} " for number in range(count)]
    ends = [None] * (count - 1) + ["length"]
    if is_chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        choices = [role] + [
            {"index": 0, "delta": {"content": token}, "finish_reason": None} for token in tokens
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": "length"})
    else:
        choices = [
            {"index": 0, "text": token, "finish_reason": end} for token, end in zip(tokens, ends, strict=True)
        ]
    pieces = [event({"id": "1", "choices": [choice]}) for choice in choices]
    if usage:
        counts = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        pieces.append(event({"id": "1", "choices": [], "usage": counts}))
    return Events([*pieces, b"data: [DONE]\n\n"])


class MockOpenAI:
    """The endpoint, as a context manager.

    Args:
        answer: of a POST; completions with as many tokens as they ask for if left out.
        models: names at /v1/models; None: it has no such path.
        together: answer only when so many requests wait for it.
        key: required as a bearer token.
        tokenizes: answer /tokenize and /detokenize, with two tokens per word.
    """

    def __init__(
        self,
        answer: Callable[[Question], Answer] = completion_events,
        models: Sequence[str] | None = ("mock",),
        together: int = 1,
        key: str | None = None,
        tokenizes: bool = False,
    ) -> None:
        self.questions: list[Question] = []
        self.peak = 0
        """Most requests without an answer at one time."""
        self.connections = 0
        self._answer, self._models, self._together, self._key = answer, models, together, key
        self._tokenizes = tokenizes
        self._waiting: list[asyncio.Event] = []
        self._running = 0
        self._stop: Callable[[], Any] = lambda: None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.url = ""

    @property
    def calls(self) -> list[Question]:
        """Requests to the API's own endpoints."""
        return [
            question
            for question in self.questions
            if question.method == "POST" and question.path.startswith("/v1/")
        ]

    @property
    def bodies(self) -> list[Mapping[str, Any]]:
        """Their bodies."""
        return [question.body for question in self.calls]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join(60)

    async def _run(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await stopped.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        try:
            while await self._exchange(reader, writer, number):
                await writer.drain()
        except (EOFError, OSError):
            pass
        finally:
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        """Answer one request; return whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        question = Question(method, path, headers, json.loads(body or b"{}"), number)
        self.questions.append(question)
        answer = await self._decide(question)
        if isinstance(answer, Document):
            data = json.dumps(answer.value).encode()
            writer.write(
                f"HTTP/1.1 {answer.status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
                "\r\n\r\n".encode()
                + data
            )
            return not answer.closes
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for piece in answer.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if answer.is_whole:
            writer.write(b"0\r\n\r\n")
        return answer.is_whole

    async def _decide(self, question: Question) -> Answer:
        if self._key is not None and question.headers.get("authorization") != f"Bearer {self._key}":
            return Document({"error": {"message": "no such key"}}, 401)
        if question.path == "/v1/models" and self._models is not None:
            return Document({"object": "list", "data": [{"id": name} for name in self._models]})
        if self._tokenizes and question.path == "/tokenize":
            return Document(
                {"tokens": [id_ for word in question.body["prompt"].split() for id_ in (len(word), 0)]}
            )
        if self._tokenizes and question.path == "/detokenize":
            return Document({"prompt": " ".join("w" * id_ for id_ in question.body["tokens"] if id_)})
        if question.method != "POST" or not question.path.startswith("/v1/"):
            return Document({"error": {"message": "not here"}}, 404)
        mine = asyncio.Event()
        self._waiting.append(mine)
        self._running += 1
        self.peak = max(self.peak, self._running)
        if len(self._waiting) >= self._together:
            for one in self._waiting:
                one.set()
            self._waiting.clear()
        await mine.wait()
        self._running -= 1
        return self._answer(question)
