"""Scan for the token usage of an answer, without parsing it.

Owns: finding the usage, and hiding it from clients that did not ask for it, or not in every event.
Must not know: anything else about answers.

A quote inside a JSON string is escaped, so `"usage":` unescaped can only be a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from argosy_router.http.sse import named_events, response_events

TAIL_BYTES: Final = 2048
"""Length of the longest usage that is found; with details a usage takes a few hundred bytes."""

MAX_LOOKS: Final = 1000
"""So many objects by this name are looked into, from one end of an answer or event. Who sends a request, or an engine,
may have written a million of them; few fields come behind the usage."""

WINDOW_BYTES: Final = 64 * 1024
"""Searched at once, from the end on: a million texts of this name may be no usage, and a search takes a tenth of the
time that a look at each of them takes."""
MAX_BETWEEN_BYTES: Final = 64
"""Between a key and its value."""

_KEY: Final = b'"usage"'
_BETWEEN: Final = b" \t\r\n:"
"""What may stand between a key and its value."""
_VALUE: Final = re.compile(rb'"usage"[ \t\r\n:]{0,%d}+(\{)' % MAX_BETWEEN_BYTES)
_VALUE_OR_NULL: Final = re.compile(rb'"usage"[ \t\r\n:]{0,%d}+(\{|null)' % MAX_BETWEEN_BYTES)
_MAX_COUNT_BYTES: Final = 12
"""Longest count with what precedes it: nine digits, compact or pretty-printed."""
_NULL: Final = b"null"
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_CHOICES: Final = b'"choices"'
_INDEX: Final = b'"index"'
_OBJECT: Final = re.compile(rb"\s*:\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
"""What follows a key whose value is an object of numbers, or of objects of numbers."""
_MESSAGE_START: Final = re.compile(rb"^event: ?message_start\r?$", re.MULTILINE)
_MESSAGE_DELTA: Final = re.compile(rb"^event: ?message_delta\r?$", re.MULTILINE)
_RESPONSE_END: Final = response_events(b"completed", b"incomplete", b"failed")
"""No JSON string contains a line break, so that text of an answer cannot match."""


class TokenUsage:
    """The tokens of one answer."""

    __slots__ = ("cached_tokens", "completion_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        """Prompt tokens, including cached ones."""
        self.cached_tokens = cached_tokens
        self.completion_tokens = completion_tokens
        """Generated tokens; zero for embeddings."""


def find_usage(answer: bytes) -> TokenUsage | None:
    """Return the last usage in an answer or a part of one; None if there is none."""
    for usage in _usages(answer):
        found = _usage_of(usage)
        if found is not None:
            return found
    return None


def response_end_usage(events: bytes) -> TokenUsage | None:
    """Return the usage in the last event of a stream of the Responses API; None before that event, or if it has none.

    All events with the response repeat objects of the request, such as schemas of tools, in which a client may have
    written a usage of its own. The response's usage comes behind them.
    """
    ends = list(named_events(events, _RESPONSE_END))
    for usage in _usages(events[ends[-1] :] if ends else b"", with_null=True):
        return None if usage.startswith(_NULL) else _usage_of(usage)
    return None


def message_start_usage(events: bytes) -> TokenUsage | None:
    """Return the usage with which a stream of Anthropic's API begins; None of other streams. Its output tokens are a
    placeholder."""
    start = _MESSAGE_START.search(events) if events.find(b"message_start") >= 0 else None
    return None if start is None else find_usage(events[start.start() :].partition(b"\n\n")[0])


def message_delta_usage(events: bytes, begun: TokenUsage) -> TokenUsage | None:
    """Return the usage that the last `message_delta` of a stream reports; None without one. Anthropic's documented one
    counts output tokens only: those of the prompt are what `begun`, the usage of `message_start`, has."""
    ends = [found.start() for found in _MESSAGE_DELTA.finditer(events)]
    for usage in _usages(events[ends[-1] :] if ends else b""):
        completion = _count(usage, b'"output_tokens"')
        if completion is None:
            continue
        uncached = _count(usage, b'"input_tokens"')
        if uncached is not None:
            reported = _message_usage(usage, uncached)
            if reported.prompt_tokens > 0:
                return reported
        return TokenUsage(begun.prompt_tokens, begun.cached_tokens, completion)
    return None


def _message_usage(usage: bytes, uncached: int) -> TokenUsage:
    """Return a usage of Anthropic's API, which counts cached prompt tokens apart from the others."""
    created = _count(usage, b'"cache_creation_input_tokens"') or 0
    cached = _count(usage, b'"cache_read_input_tokens"') or 0
    return TokenUsage(uncached + created + cached, cached, _count(usage, b'"output_tokens"') or 0)


def _response_usage(usage: bytes, input_tokens: int) -> TokenUsage:
    """Return a usage of OpenAI's Responses API."""
    cached, output = _count(usage, b'"cached_tokens"'), _count(usage, b'"output_tokens"')
    return TokenUsage(input_tokens, cached or 0, output or 0)


def _usage_of(usage: bytes) -> TokenUsage | None:
    """Read the beginning of a usage."""
    prompt_tokens = _count(usage, b'"prompt_tokens"')
    if prompt_tokens is not None:
        cached, completion = _count(usage, b'"cached_tokens"'), _count(usage, b'"completion_tokens"')
        return TokenUsage(prompt_tokens, cached or 0, completion or 0)
    input_tokens = _count(usage, b'"input_tokens"')
    if input_tokens is None:
        return None
    is_response = _count(usage, b'"total_tokens"') is not None
    return (_response_usage if is_response else _message_usage)(usage, input_tokens)


def _usages(
    answer: bytes, begin: int = 0, end: int | None = None, *, with_null: bool = False
) -> Iterator[bytes]:
    """Yield beginnings of usages between two positions, last first. A token of this text among log probabilities is
    none, and null is one only `with_null`."""
    end = len(answer) if end is None else end
    value = _VALUE_OR_NULL if with_null else _VALUE
    looks, stop = 0, end
    while looks < MAX_LOOKS and (last := answer.rfind(_KEY, begin, stop)) >= 0:
        start = max(begin, last + len(_KEY) - WINDOW_BYTES)
        within = list(value.finditer(answer, start, min(end, last + TAIL_BYTES)))
        for found in reversed(within):
            key = found.start()
            if key <= last:  # else it was in the window behind
                looks += 1
                yield answer[found.start(1) : min(end, key + TAIL_BYTES)]
        stop = min(last, start + len(_KEY) - 1)


def _count(usage: bytes, key: bytes) -> int | None:
    """Return the number behind the first `key`. Compiled, this takes a tenth of a regular expression's time."""
    count, num_digits = 0, 0
    for byte in usage.partition(key)[2][:_MAX_COUNT_BYTES]:
        digit = byte - 48
        if 0 <= digit <= 9:
            count = 10 * count + digit
            num_digits += 1
        elif num_digits or byte not in _BETWEEN:
            break
    return count if num_digits else None


def is_final(events: bytes) -> bool:
    """Whether the last usage in events of chunks is that of the whole answer: its event has no choices."""
    last = events.rfind(_KEY)
    return last >= 0 and _has_no_choices(events, *_Bounds(events).around(last))


def event_usage(events: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield choice and completion tokens of each whole event that reports them, and where it ends. Takes a time that
    grows with the length, whatever an event repeats, and however events are divided."""
    bounds = _Bounds(events)
    at = 0
    while (start := events.find(_KEY, at)) >= 0:
        begin, end = bounds.around(start, at)
        tokens = _completion_tokens(events, start, end)
        if tokens is not None:
            choice = events.find(_INDEX, begin, end)
            yield (
                (0 if choice < 0 else _count(events[choice : choice + TAIL_BYTES], _INDEX) or 0),
                tokens,
                end + (3 if events.startswith(b"\n\r", end) else 2),
            )
        at = end


def _completion_tokens(events: bytes, start: int, end: int) -> int | None:
    """Read the last usage with completion tokens between two positions."""
    for usage in _usages(events, start, end):
        tokens = _count(usage, b'"completion_tokens"')
        if tokens is not None:
            return tokens
    return None


class _Bounds:
    """Where events begin and end, asked for at ever later positions. Searching for bytes takes a tenth of a regular
    expression's time; what was found is kept, because one of the two blank lines may be in no event."""

    __slots__ = ("_crlf", "_events", "_lf")

    def __init__(self, events: bytes) -> None:
        self._events = events
        self._lf = self._crlf = -1
        """The next blank lines of either form, from the last position on."""

    def around(self, at: int, since: int = 0) -> tuple[int, int]:
        """Return where the event that has this position begins, not before `since`, and ends."""
        events = self._events
        begin = max(events.rfind(b"\n\n", since, at), since)
        begin = max(events.rfind(b"\n\r\n", begin, at), begin)
        return begin, self._blank(at)

    def end_of(self, begin: int) -> int:
        """Return where the event ends that begins here, its blank line included."""
        blank = self._blank(begin)
        return min(len(self._events), blank + (3 if self._events.startswith(b"\n\r", blank) else 2))

    def _blank(self, at: int) -> int:
        """Return where the next blank line is, from a position on."""
        events = self._events
        if self._lf < at:
            self._lf = _found(events.find(b"\n\n", at), events)
        if self._crlf < at:
            self._crlf = _found(events.find(b"\n\r\n", at), events)
        return min(self._lf, self._crlf)


def _found(position: int, events: bytes) -> int:
    return len(events) if position < 0 else position


def _has_no_choices(events: bytes, begin: int, end: int) -> bool:
    choices = events.find(_CHOICES, begin, end)
    return choices >= 0 and _NO_CHOICES.match(events, choices) is not None


class UsageFinder:
    """Finds the usage, anywhere in an answer that comes in pieces."""

    __slots__ = ("_edge", "usage")

    def __init__(self) -> None:
        self.usage: TokenUsage | None = None
        """The last usage found so far."""
        self._edge = b""
        """The end of the earlier pieces, in which a usage may have begun."""

    def feed(self, data: bytes) -> None:
        window = self._edge + data
        self.usage = find_usage(window) or self.usage
        self._edge = window[-TAIL_BYTES:]


def num_events(events: bytes) -> int:
    """Count whole events: no JSON string contains a line break."""
    return events.count(b"\n\n") or events.count(b"\n\r\n")


def without_usage(events: bytes) -> bytes:
    """Drop from whole events the one that reports the usage and nothing else."""
    if events.rfind(_KEY) < 0 or _NO_CHOICES.search(events) is None:  # null may be in every event
        return events
    kept: list[bytes] = []
    bounds = _Bounds(events)
    begin = done = 0
    while begin < len(events):
        end = bounds.end_of(begin)
        if events.find(_KEY, begin, end) >= 0 and _NO_CHOICES.search(events, begin, end) is not None:
            kept.append(events[done:begin])
            done = end
        begin = end
    return b"".join((*kept, events[done:])) if kept else events


def without_progress(events: bytes) -> bytes:
    """Drop the usage from whole events that have choices too."""
    kept: list[bytes] = []
    bounds = _Bounds(events)
    done = at = end = looks = 0
    is_last = False
    while (start := events.find(_KEY, at)) >= 0:
        if start >= end:  # in another event
            begin, end = bounds.around(start, end)
            is_last, looks = _has_no_choices(events, begin, end), 0
        looks += 1
        if looks > MAX_LOOKS:
            at = end
            continue
        at = start + len(_KEY)
        value = None if is_last else _OBJECT.match(events, at)
        if value is None:
            continue
        at = value.end()
        comma = events.rfind(b",", done, start)
        if comma >= 0 and not events[comma + 1 : start].strip():
            kept.append(events[done:comma])
        else:  # the first field has no comma before it
            kept += (events[done:start], b'"usage":null')
        done = at
    return b"".join((*kept, events[done:])) if kept else events
