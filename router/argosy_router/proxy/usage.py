"""Token counts out of an answer, without parsing it.

Owns: having every stream tell its usage, finding it in the last bytes, and keeping it from clients that did not ask.
Must not know: anything else about answers.

A quote inside a JSON string is escaped, so `"usage":` unescaped can only be a key.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL_BYTES = 2048
"""Usage is the last thing an answer says; with details it takes a few hundred bytes."""

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


def find_usage(tail: bytes) -> TokenUsage | None:
    """Usage in the end of an answer or stream, or None when it has none."""
    start = tail.rfind(b'"usage"', max(0, len(tail) - TAIL_BYTES))
    if start < 0:
        return None
    prompt = _PROMPT.search(tail, start)
    if prompt is None:
        return None
    cached = _CACHED.search(tail, start)
    completion = _COMPLETION.search(tail, start)
    return TokenUsage(
        int(prompt[1]), int(cached[1]) if cached else 0, int(completion[1]) if completion else 0
    )


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
