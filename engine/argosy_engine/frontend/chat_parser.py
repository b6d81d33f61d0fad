"""ChatParser: splits generated text into reasoning, content and tool calls, as it streams.

It parses `<think>...</think>` at the start (Qwen3, DeepSeek-R1) and Hermes tool calls,
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The scanner is written by hand: linear time, no regular
expressions (CVE-2025-48887), JSON only (CVE-2025-9141).

Invariant: the concatenated deltas do not depend on how the text was split, so streamed and unary responses agree.
"""

from __future__ import annotations

import json
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MAX_SEAM = len(_END_CALL) - 1
"""Characters before a piece of text that may be the beginning of a marker in it."""
_MAX_TRIMMED = 16
"""Maximum white space around a marker that belongs to it, so that the output of a model that writes only newlines is
not held back for ever."""


class ParsedCall(NamedTuple):
    name: str
    arguments: str
    """Arguments as the JSON text of an object."""


class Parsed(NamedTuple):
    """What a piece of text added to the message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()


class ChatParser:
    """
    Args:
        parse_reasoning: split a leading think block off the content.
        is_reasoning: whether the prompt has opened that block, so that the text begins inside it.
        parse_calls: turn tool-call blocks into calls; off if the request has no tools.
        calls_end_reasoning: whether a complete call inside the reasoning counts and ends it. Off if a grammar
            constrains the call, because the grammar begins after the reasoning.
    """

    def __init__(
        self,
        *,
        parse_reasoning: bool,
        parse_calls: bool,
        is_reasoning: bool = False,
        calls_end_reasoning: bool = False,
    ) -> None:
        self._parse_calls = parse_calls
        self._calls_end_reasoning = parse_calls and calls_end_reasoning
        self._state = "reasoning" if is_reasoning else "start" if parse_reasoning else "content"
        self._buffer = ""
        self._pending: list[str] = []
        """Text of an open call that is not in the buffer yet, because it cannot end the call."""
        self._last_chars = ""
        self._newlines_to_skip = _MAX_TRIMMED if is_reasoning else 0
        """Number of newlines after a marker that still belong to it."""
        self.num_calls = 0

    def feed(self, text: str, is_last: bool = False) -> Parsed:
        """Parse more text. With `is_last` nothing is held back."""
        recent = self._last_chars + text
        self._last_chars = recent[-_MAX_SEAM:]
        if not is_last and not self._may_advance(recent):
            self._pending.append(text)
            return Parsed()
        self._buffer = "".join((self._buffer, *self._pending, text))
        self._pending.clear()
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ParsedCall] = []
        while self._advance(reasoning, content, calls, is_last):
            pass
        if is_last and self._state == "call":
            content.append(_CALL + self._buffer)  # an unclosed call is not a call but content
            self._buffer = ""
        self.num_calls += len(calls)
        return Parsed("".join(reasoning), "".join(content), tuple(calls))

    def _may_advance(self, recent: str) -> bool:
        """Whether an open call may end in the recent text: only then is the whole call looked at."""
        match self._state:
            case "call":
                return _END_CALL in recent
            case "call in thought":
                return _END_CALL in recent or END_THINK in recent
        return True

    def _advance(
        self, reasoning: list[str], content: list[str], calls: list[ParsedCall], is_last: bool
    ) -> bool:
        """Consume the unambiguous part of the buffer; return True if the state changed and more may follow."""
        match self._state:
            case "start":
                return self._leave_start(is_last)
            case "reasoning":
                markers = {END_THINK: "content"}
                if self._calls_end_reasoning:
                    markers[_CALL] = "call in thought"
                return self._take_until(markers, reasoning, is_last)
            case "content":
                return self._take_until({_CALL: "call"} if self._parse_calls else {}, content, is_last)
            case "call in thought":
                return self._take_call_in_thought(reasoning, calls, is_last)
            case _:
                return self._take_call(content, calls)

    def _leave_start(self, is_last: bool) -> bool:
        head = self._buffer.lstrip()
        is_near = len(self._buffer) - len(head) <= _MAX_TRIMMED
        if is_near and head.startswith(THINK):
            self._enter("reasoning", head[len(THINK) :])
            return True
        if is_near and not is_last and THINK.startswith(head):
            return False  # may still become a think block
        self._state = "content"
        return True

    def _take_until(self, markers: dict[str, str], into: list[str], is_last: bool) -> bool:
        """Move the text before the first marker to `into`, without the newlines around markers.

        `markers` maps each marker to the state after it.
        Without a marker, holds back what may be the beginning of one and the newlines before it.
        """
        while self._newlines_to_skip and self._buffer.startswith("\n"):
            self._buffer = self._buffer[1:]
            self._newlines_to_skip -= 1
        found = [(position, marker) for marker in markers if (position := self._buffer.find(marker)) >= 0]
        if found:
            position, marker = min(found)
            into.append(_without_last_newlines(self._buffer[:position]))
            self._enter(markers[marker], self._buffer[position + len(marker) :])
            return True
        certain = self._buffer
        if markers and not is_last:
            overlap = max(_overlap(certain, marker) for marker in markers)
            certain = _without_last_newlines(certain[: len(certain) - overlap])
        if certain:
            self._newlines_to_skip = 0
        into.append(certain)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _take_call_in_thought(self, reasoning: list[str], calls: list[ParsedCall], is_last: bool) -> bool:
        """Consume a possible call inside the reasoning: it counts only if it is complete before the reasoning ends."""
        end, end_of_thought = self._buffer.find(_END_CALL), self._buffer.find(END_THINK)
        if end >= 0 and not 0 <= end_of_thought < end:
            call = _parse_call(self._buffer[:end])
            if call is not None:
                calls.append(call)
                self._enter("content", self._buffer[end + len(_END_CALL) :])
                return True
        elif end_of_thought < 0 and not is_last:
            return False
        reasoning.append(_CALL)
        self._state, self._newlines_to_skip = "reasoning", 0
        return True

    def _take_call(self, content: list[str], calls: list[ParsedCall]) -> bool:
        position = self._buffer.find(_END_CALL)
        if position < 0:
            return False
        body, rest = self._buffer[:position], self._buffer[position + len(_END_CALL) :]
        call = _parse_call(body)
        if call is None:
            content.append(_CALL + body + _END_CALL)
            self._state, self._buffer, self._newlines_to_skip = "content", rest, 0
        else:
            calls.append(call)
            self._enter("content", rest)
        return True

    def _enter(self, state: str, rest: str) -> None:
        self._state, self._buffer = state, rest
        self._newlines_to_skip = 0 if "call" in state else _MAX_TRIMMED


def _parse_call(body: str) -> ParsedCall | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict) or not _is_text(value["name"]):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN and infinities, which Python's parser accepts but JSON does not have
        return None
    # Half of a surrogate pair can only be written as an escape.
    return ParsedCall(value["name"], text if _is_text(text) else json.dumps(arguments))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_last_newlines(text: str) -> str:
    end = len(text)
    while end and len(text) - end < _MAX_TRIMMED and text[end - 1] == "\n":
        end -= 1
    return text[:end]


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` begins."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
