"""Token counts out of an answer, without parsing it.

Owns: having every stream tell its usage, finding it, and keeping it from clients that did not ask.
Must not know: anything else about answers.

A quote inside a JSON string is escaped, so `"usage":` unescaped can only be a key.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL_BYTES = 2048
"""Longest usage that is understood; with details it takes a few hundred bytes."""

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')
_COMPLETION = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')


_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_EVENT_END = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")


class TokenUsage(NamedTuple):
    prompt_tokens: int
    """Cached ones included."""
    cached_tokens: int
    completion_tokens: int
    """Zero where nothing is generated (embeddings)."""


def find_usage(answer: bytes) -> TokenUsage | None:
    """The last usage in an answer or a part of one, or None when there is none."""
    end = len(answer)
    while (start := answer.rfind(b'"usage"', 0, end)) >= 0:
        end = start
        if _USAGE.match(answer, start) is None:
            continue  # null, or a token of this text among log probabilities
        stop = start + TAIL_BYTES
        prompt = _PROMPT.search(answer, start, stop)
        if prompt is None:
            continue
        cached = _CACHED.search(answer, start, stop)
        completion = _COMPLETION.search(answer, start, stop)
        return TokenUsage(
            int(prompt[1]), int(cached[1]) if cached else 0, int(completion[1]) if completion else 0
        )
    return None


class UsageFinder:
    """Finds the usage of an answer that comes in pieces: it may stand anywhere in it."""

    __slots__ = ("_edge", "usage")

    def __init__(self) -> None:
        self.usage: TokenUsage | None = None
        """The last one so far."""
        self._edge = b""
        """The end of what came before, in which a usage may have begun."""

    def feed(self, data: bytes) -> None:
        window = self._edge + data
        self.usage = find_usage(window) or self.usage
        self._edge = window[-TAIL_BYTES:]


def num_events(events: bytes) -> int:
    """How many whole events these are: no JSON string contains a line break."""
    return events.count(b"\n\n") or events.count(b"\n\r\n")


def asking_usage(body: bytes) -> bytes:
    """A request with the JSON object `body` and without stream options, whose stream ends by telling its usage."""
    return b'%b,"stream_options":{"include_usage":true}}' % body[: body.rindex(b"}")]


def without_usage(events: bytes) -> bytes:
    """Whole events, less the one that tells nothing but the usage."""
    if _NO_CHOICES.search(events) is None:  # nearly always; `"usage":null` may be in every event
        return events
    return b"".join(
        event
        for event in _EVENT_END.split(events)
        if b'"usage"' not in event or _NO_CHOICES.search(event) is None
    )
