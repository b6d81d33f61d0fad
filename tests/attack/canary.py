"""Canary: ordinary clients that run during the attacks and check every answer to the last character.

Owns the canary's requests and a record of each. Must not know which attack is running, or the limits. Requests are
greedy, so each answer must equal the answer to the same question before the attack: with our CPU kernels, neither batch
nor cache nor a change of replica may alter it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .fleet import CANARY_KEY, MODEL
from .wire import Broken, Response, ask

STREAMS = 2
"""Number of streams in flight."""
PAUSE_S = 0.2
TIMEOUT_S = 90.0
"""A request that takes longer counts as failed. Stalls are found long before."""
QUESTIONS = (
    "Hello! What can you do?",
    "The wifi password is hunter88. What is the wifi password?",
    "Tell me about the sea.",
    "Say the word lantern three times.",
    "My name is Ada. What is my name?",
)
CHOICES = ("red", "green", "blue", "yellow")


@dataclass(frozen=True)
class Record:
    """One request of the canary."""

    kind: str
    sent_at: float
    ended_at: float
    waits: tuple[tuple[float, float], ...]
    """Intervals without events: from the request to the first event, and between events."""
    failure: str = ""
    tokens: int = 0
    """Tokens of an answer that came in one piece; 0 for streams."""


class Canary:
    """The canary's clients."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._expected: dict[str, str] = {}
        self._numbers = itertools.count()
        self.records: list[Record] = []

    async def learn(self) -> None:
        """Ask every question on an idle fleet and record the answers as the expected ones.

        Raises:
            RuntimeError: a request failed.
        """
        for question in QUESTIONS:
            response = await ask(self._port, "/v1/chat/completions", chat(question), key=CANARY_KEY)
            if response.status != 200:
                raise RuntimeError(f"before any attack: {response.status} {response.body[:300]!r}")
            self._expected[question] = response.json()["choices"][0]["message"]["content"]

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(self._repeat(self._stream))
            tasks.create_task(self._repeat(self._unary))
            tasks.create_task(self._repeat(self._choice))

    async def _repeat(self, once: Callable[[int], Any]) -> None:
        while True:
            await once(next(self._numbers))
            await asyncio.sleep(PAUSE_S)

    async def _stream(self, number: int) -> None:
        question = QUESTIONS[number % len(QUESTIONS)]
        await self._ask("stream", {**chat(question), "stream": True}, self._expected[question], streamed)

    async def _unary(self, number: int) -> None:
        question = QUESTIONS[number % len(QUESTIONS)]
        await self._ask("unary", chat(question), self._expected[question], answered)

    async def _choice(self, number: int) -> None:
        """Ask for a structured output whose grammar is in no cache."""
        choices = [f"{word} {number}" for word in CHOICES]
        body = {**chat("Pick a colour."), "structured_outputs": {"choice": choices}}
        await self._ask("structured", body, choices, answered)

    async def _ask(
        self, kind: str, body: dict[str, Any], expected: str | list[str], read: Callable[[Response], str]
    ) -> None:
        began = time.monotonic()
        try:
            response = await ask(
                self._port, "/v1/chat/completions", body, key=CANARY_KEY, timeout_s=TIMEOUT_S
            )
        except (OSError, Broken, TimeoutError) as error:
            now = time.monotonic()
            failure = f"{type(error).__name__}: {error}"
            self.records.append(Record(kind, began, now, ((began, now),), failure))
            return
        self.records.append(
            Record(
                kind,
                began,
                response.ended_at,
                tuple(itertools.pairwise((began, *(response.arrivals or [response.ended_at])))),
                _failure(response, expected, read),
                0 if kind == "stream" else _num_tokens(response),
            )
        )


def chat(question: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 48,
    }


def _failure(response: Response, expected: str | list[str], read: Callable[[Response], str]) -> str:
    if response.status != 200:
        return f"status {response.status}: {response.body[:200].decode(errors='replace')}"
    try:
        text = read(response)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error} in {response.body[-200:]!r}"
    if text in expected if isinstance(expected, list) else text == expected:
        return ""
    return f"answered {text[:120]!r}"


def _num_tokens(response: Response) -> int:
    try:
        return int(response.json()["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return 0  # it has failed


def answered(response: Response) -> str:
    """Return the text of a non-streamed answer."""
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def streamed(response: Response) -> str:
    """Return the text of a complete stream.

    Raises:
        ValueError: the stream is incomplete or has an error event.
    """
    events = [line for line in response.body.split(b"\n\n") if line and not line.startswith(b":")]
    if not events or events[-1] != b"data: [DONE]":
        raise ValueError("the stream has no end")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    if failed := [chunk["error"] for chunk in chunks if "error" in chunk]:
        raise ValueError(f"error event: {failed[0]}")
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
