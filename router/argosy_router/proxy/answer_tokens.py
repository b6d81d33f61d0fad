"""The tokens of an answer: the usage that it reports, and what a client has of a stream that is cut or moves.

Owns: finding the usage and hiding it from clients that did not ask for it; the count of a stream without usage; the
transcript from which another replica continues a stream. Must not know: connections, replicas, retries, who pays.

Usage is found without parsing: a quote inside a JSON string is escaped, so `"usage":` unescaped can only be a key.

A tally counts a stream whose events carry no token ids, by usage that events report, else by text, never by the number
of events alone, because an event may show thousands of tokens. Engines of other makes count the tokens of each choice
by itself. A stream costs a reference per read until `SCAN_BYTES` have come together; most end before, with their usage,
and are never scanned. Of an event that is longer than some reads only both ends are scanned, and stand for the whole.

A transcript keeps the token ids of the events that the client was sent; only whole events count. An engine's output is
a function of the ids before it, so what was sent and what a continuation adds are together the stream of an undisturbed
run. A stream costs a reference per read until `PARSED_TOGETHER_BYTES` have come together; then they are parsed, and
four bytes per token stay. A stream without ids, such as a foreign replica's, cannot be continued; nor can those that
`request_body.resumable_shape` excludes, nor one of whose echoed prompt the client has only a part. Of a stream of
Anthropic's API, in which an engine makes several events of one output and only the last has its token ids, a client
that was sent some of them only cannot be continued for, except after `message_delta`, when only the last event is
missing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import ClassVar, Final

import msgspec

from argosy_protocol.anthropic import MESSAGE_STOP, ResumedMessage
from argosy_protocol.headers import ID_COMMENT
from argosy_protocol.openai import Resume, ResumedChoice
from argosy_router.http.sse import READ_BYTES, named_events, response_events
from argosy_router.proxy.decoded_types import BlockType, StreamShape, decode_block_start, decode_chunk

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
_OBJECT: Final = re.compile(rb"\s{0,64}+:\s{0,64}+\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}")
"""What follows a key whose value is an object of numbers, or of objects of numbers."""
_MESSAGE_START: Final = re.compile(rb"^event: ?message_start\r?$", re.MULTILINE)
_MESSAGE_DELTA: Final = re.compile(rb"^event: ?message_delta\r?$", re.MULTILINE)
_RESPONSE_END: Final = response_events(b"completed", b"incomplete", b"failed")
"""No JSON string contains a line break, so that text of an answer cannot match."""


class TokenUsage:
    """The tokens of one answer."""

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
        value = None if is_last else _OBJECT.match(events, at, min(len(events), at + TAIL_BYTES))
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


SCAN_BYTES: Final = 32 * 1024
"""Some 120 events. 5,000 open streams hold 160 MB at most."""
MAX_CHOICES: Final = 1024
"""Choices whose usage is kept apart; more than a request may have."""

_STRING: Final = rb'"\s*+:\s*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
_TEXT: Final = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|thinking|refusal|arguments|partial_json)' + _STRING,
    re.DOTALL,
)
"""Quotes inside strings are escaped, so an unescaped key is one. Objects, such as `delta`, and lists are no text."""
_RESPONSE_TEXT: Final = re.compile(rb'"delta' + _STRING, re.DOTALL)
"""Other texts of a stream of the Responses API repeat these."""
_ESCAPED_CHARACTER_BYTES: Final = 6
_CHARACTER_BYTES: Final = 3
"""UTF-8 of the scripts that some engines escape (`\\u4e2d`)."""


class StreamTally:
    """What one stream has shown so far."""

    def __init__(self, *, is_response: bool = False) -> None:
        """`is_response`: the stream is one of the Responses API."""
        self._text = _RESPONSE_TEXT if is_response else _TEXT
        self._repeats = is_response
        """Whether long events repeat what others have told."""
        self._opening = b'"delta":"' if is_response else b'"content":"'
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._events = 0
        self._text_bytes = 0
        self._reported: dict[int, int] = {}
        """Completion tokens that events reported, by choice."""

    def add(self, events: bytes) -> None:
        """Add whole events."""
        if len(events) > 2 * READ_BYTES:
            self._add_long(events)
            return
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > SCAN_BYTES:
            self._read()

    def _add_long(self, events: bytes) -> None:
        """Add events of which the first is longer than some reads."""
        self._read()
        before, between = self._text_bytes, len(events) - SCAN_BYTES - READ_BYTES
        front, back = events[:SCAN_BYTES].rstrip(b"\\") + b'"', events[-READ_BYTES:]
        self._scan(front)
        shown = self._text_bytes - before
        if any(text.end() == len(front) for text in self._text.finditer(front)):  # that goes on behind it
            self._text_bytes += between
            back = self._opening + back
        elif shown > 0 and not self._repeats:
            self._text_bytes += shown * between // SCAN_BYTES
        self._scan(back)

    def tokens(self, bytes_per_token: float) -> int:
        """Return the tokens of all choices that were shown: those that events report, and for what came after the last
        report (all, if there is none) its text by this ratio, but a token for each event at least."""
        self._read()
        return sum(self._reported.values()) + max(int(self._text_bytes / bytes_per_token), self._events)

    def _read(self) -> None:
        events = b"".join(self._unread)
        self._unread = []
        self._unread_bytes = 0
        self._scan(events)

    def _scan(self, events: bytes) -> None:
        """Count what events show."""
        reported_until = 0
        for choice, tokens, end in event_usage(events):
            reported_until = end
            if choice in self._reported or len(self._reported) < MAX_CHOICES:
                self._reported[choice] = max(tokens, self._reported.get(choice, 0))
        if reported_until:
            self._events = self._text_bytes = 0
            events = events[reported_until:]
        self._events += num_events(events)
        for text in self._text.findall(events):
            escaped = text.count(b"\\u") if b"\\" in text else 0
            self._text_bytes += len(text) - (_ESCAPED_CHARACTER_BYTES - _CHARACTER_BYTES) * escaped


PARSED_TOGETHER_BYTES = 32 * 1024
"""Some 120 events: most streams end before, and are never parsed. 5,000 open ones hold 160 MB at most."""
MAX_RESUMED_TOKENS = 1 << 20
"""Of all choices. A longer stream is not continued: 4 MB of memory, 7 MB of request."""
MAX_PARSED_EVENTS = 8192
"""Parsed at once, which takes some 30 ms: a read has a third of them if they are as short as an engine's are."""
MAX_PARSED_BYTES = 1 << 20
"""Of an event beside its comment. Our engines split longer ones; one that is full of short values takes 40 ms."""
DONE = b"data: [DONE]\n\n"
_DATA = b"data: "
_decode_ids = msgspec.json.Decoder(list[int]).decode


class Transcript:
    """The part of one stream that the client was sent."""

    error_mark: ClassVar[bytes] = b'data: {"error":'
    """Beginning of an error event. No JSON string contains it, because quotes are escaped there."""
    unavailable_mark: ClassVar[bytes] = b'"type":"service_unavailable"'
    """What the error event of an engine that shuts down contains."""

    def __init__(self, shape: StreamShape) -> None:
        self._shape = shape
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._is_readable = True
        self._is_done = False
        self._created = 0
        self._has_usage = False
        self._token_ids = [array("i") for _ in range(shape.choices)]
        self._finished = [False] * shape.choices
        self._half_echoed: set[int] = set()
        """Choices that have begun to echo the prompt."""
        self._tally: StreamTally | None = None
        """Counts the events from the first on that could not be parsed."""
        self.num_tokens = 0
        """Token ids of all choices, as far as they were parsed."""

    def is_end(self, events: bytes) -> bool:
        """Whether a stream whose last events are `events` has its end."""
        return events.endswith(DONE)

    def add(self, events: bytes) -> None:
        """Add whole events that the client is sent."""
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > PARSED_TOGETHER_BYTES:
            self.read()

    def read(self) -> bool:
        """Parse what was added; return whether the stream can be continued."""
        events = b"".join(self._unread)
        self._unread = []
        self._unread_bytes = 0
        before = self.num_tokens
        self._is_readable = self._is_readable and events.count(b"\n\n") <= MAX_PARSED_EVENTS
        if self._is_readable and self._read_events(events):
            self._is_readable = self.num_tokens <= MAX_RESUMED_TOKENS
        else:
            self._is_readable = False
            self.num_tokens = before
            self._tally = self._tally or StreamTally()
            self._tally.add(events)
        return self._is_readable and not self._half_echoed

    @property
    def has_all_ids(self) -> bool:
        """Whether all events had their token ids, as far as they were parsed."""
        return self._tally is None

    def tokens(self, bytes_per_token: float) -> int:
        """Return the tokens of all choices, by their ids as far as the events have some that can be parsed; the others
        as `StreamTally.tokens` does."""
        self.read()
        return self.num_tokens + (0 if self._tally is None else self._tally.tokens(bytes_per_token))

    def _read_events(self, events: bytes) -> bool:
        """Return whether all events could be parsed."""
        start = 0
        try:
            while (end := events.find(b"\n\n", start)) >= 0:
                self._read_event(events[start:end])
                start = end + 2
        except (msgspec.DecodeError, LookupError, OverflowError, RecursionError, ValueError):
            return False
        return start == len(events)

    def _read_event(self, event: bytes) -> None:
        has_comment = event.startswith(ID_COMMENT)
        if has_comment:
            comment, _, event = event.partition(b"\n")
            self._read_comment(comment)
        if not event or (event.startswith(b":") and b"\n" not in event):
            return  # a comment, and nothing else
        data = event.removeprefix(_DATA)
        if data == b"[DONE]":
            self._is_done = True
            return
        if len(data) > MAX_PARSED_BYTES:
            raise LookupError("a long event")
        chunk = decode_chunk(data)
        self._created = self._created or chunk.created
        self._has_usage = self._has_usage or (chunk.usage is not None and not chunk.choices)
        for choice in chunk.choices:
            if choice.token_ids is not None:
                self._add_tokens(choice.index, choice.token_ids)
            elif not has_comment or choice.index < 0:
                raise LookupError
            self._finished[choice.index] |= choice.finish_reason is not None
            if self._shape.has_echo:
                if self._token_ids[choice.index] or self._finished[choice.index]:
                    self._half_echoed.discard(choice.index)
                else:
                    self._half_echoed.add(choice.index)

    def _read_comment(self, comment: bytes) -> None:
        index, _, token_ids = comment.removeprefix(ID_COMMENT).partition(b" ")
        if token_ids.count(b",") >= MAX_RESUMED_TOKENS:
            raise LookupError("more ids than a stream that is continued may have")
        if token_ids:
            self._add_tokens(int(index), _decode_ids(b"[%b]" % token_ids))

    def _add_tokens(self, index: int, token_ids: list[int]) -> None:
        if index < 0:
            raise LookupError
        self._token_ids[index].extend(token_ids)
        self.num_tokens += len(token_ids)

    # The rest is valid only after `read` has returned True.

    @property
    def missing_end(self) -> bytes | None:
        """The end that completes the stream, empty if it is complete; None if an engine must continue it."""
        if self._is_done:
            return b""
        is_complete = all(self._finished) and (self._has_usage or not self._shape.has_usage)
        return DONE if is_complete else None

    def continuing(self, body: bytes) -> bytes:
        """Return the JSON object `body` with the field that has an engine continue the stream."""
        resume = Resume(
            created=self._created,
            choices=[
                ResumedChoice(token_ids=list(token_ids), finished=finished)
                for token_ids, finished in zip(self._token_ids, self._finished, strict=True)
            ],
        )
        return b'%b,"resume":%b}' % (body[: body.rindex(b"}")], msgspec.json.encode(resume))


_WITHOUT_STATE = frozenset((b"message_start", b"content_block_delta", b"ping"))


class MessageTranscript(Transcript):
    """The part of one streamed message that the client was sent."""

    error_mark: ClassVar[bytes] = b"event: error\ndata: "
    unavailable_mark: ClassVar[bytes] = b'"type":"overloaded_error"'

    def __init__(self, shape: StreamShape) -> None:
        super().__init__(shape)
        self._num_blocks = 0
        self._open_block: BlockType | None = None
        """Type of the content block that has begun and not ended."""
        self._is_complete = False
        """Whether only the last event is missing."""
        self._has_half_output = False
        """Whether the last event was not the last one of an output."""

    def is_end(self, events: bytes) -> bool:
        return events.endswith(MESSAGE_STOP) or events.rfind(self.error_mark) >= 0

    def read(self) -> bool:
        return super().read() and (self._is_complete or not self._has_half_output)

    def _read_event(self, event: bytes) -> None:
        if event.startswith(ID_COMMENT):
            comment, _, event = event.partition(b"\n")
            before = self.num_tokens
            self._read_comment(comment)
            self._has_half_output = self.num_tokens == before
        elif not event.startswith(b":"):
            raise LookupError("an event without token ids")
        if not event or event.startswith(b":"):
            return
        head, _, data = event.partition(b"\ndata: ")
        kind = head.removeprefix(b"event: ")
        if kind in _WITHOUT_STATE:
            return
        if kind == b"content_block_start":
            self._open_block = decode_block_start(data).content_block.type
            self._num_blocks += 1
        elif kind == b"content_block_stop":
            self._open_block = None
        elif kind == b"message_delta":
            self._is_complete = True
        elif kind == b"message_stop":
            self._is_done = True
        else:
            raise LookupError("an event of another kind")

    @property
    def missing_end(self) -> bytes | None:
        if self._is_done:
            return b""
        return MESSAGE_STOP if self._is_complete else None

    def continuing(self, body: bytes) -> bytes:
        resume = msgspec.json.encode(
            ResumedMessage(
                token_ids=list(self._token_ids[0]), num_blocks=self._num_blocks, open_block=self._open_block
            )
        )
        return b'%b,"resume":%b}' % (body[: body.rindex(b"}")], resume)
