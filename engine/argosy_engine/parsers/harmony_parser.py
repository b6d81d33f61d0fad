"""HarmonyParser: splits an output of gpt-oss into reasoning, content and tool calls, as it streams.

In OpenAI's Harmony format an output is a sequence of messages, `<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|>`,
all but the first after `<|start|>assistant`. The analysis channel is reasoning, messages to functions are calls, others
are content. Several messages of one kind are separated by a newline.

A call begins with its arguments, which follow as they are written. Within a string of them a mark is text. If there is
no call then, or no end of the string, the first of these marks has ended it.

Invariants: those of `ChatParser`. Text outside any message is content, and so is a message to a function that is no
call, with its header. Messages to tools that the request does not have belong to the reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from argosy_engine.parsers.parsed_output import (
    OBJECT_START,
    ArgumentReader,
    CallOpening,
    JsonArguments,
    Parsed,
    ParsedCall,
    ParsedCalls,
    is_text,
)
from argosy_engine.parsers.scanners import Markers, MarkerScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, json_arguments
from argosy_engine.structured.structural_tag import ToolCallForm

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_FUNCTIONS = "functions."
_BODY = re.compile(rf"\s{{0,16}}{OBJECT_START}")
_MAX_HEADER_CHARS = 1024
_MAX_HEAD_CHARS = 64
"""Characters of a message in which a call's arguments must begin for them to be read as they are written."""
_MAX_PIECE = 4096
"""Maximum characters of arguments that are read at once, so that short calls in a long text take linear time."""
_MAX_REREAD_CALLS = 4
"""Calls that are read again from a mark within a string, so that an output of such calls takes linear time."""
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_MARK = "(?P<mark>{})".format("|".join(map(re.escape, _BODY_ENDS)))
_OUTSIDE = re.compile(rf'{_MARK}|(?P<quote>")')
_IN_STRING = re.compile(rf'{_MARK}|(?P<quote>")|\\(?s:.)|(?P<broken>[\x00-\x1f])')
_HEADER_STARTS = (START, CHANNEL, MESSAGE, CONSTRAIN, " to=", "to=")


class _Part(Enum):
    BOUNDARY = auto()
    """Between two messages."""
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()
    """In the arguments of a call that has begun."""


class HarmonyParser:
    """
    Args:
        tool_parser: reads calls; None if the request has no tools.
    """

    def __init__(self, tool_parser: OpenAIToolParser | None = None) -> None:
        self._tools = tool_parser
        self._part = _Part.BOUNDARY
        self._buffer = ""
        self._header = ""
        self._call: list[str] = []
        self._head: str | None = None
        """Beginning of the open call, while it may turn out to have an opening."""
        self._reader: ArgumentReader | None = None
        self._is_in_string = False
        """Whether the arguments so far end within a string."""
        self._passed: int | None = None
        """Offset in the call of the first mark within a string."""
        self._num_rereads = 0
        self._reread = ""
        """Text that is read again, after which nothing follows: the rest after a call."""
        self._message_end = Markers((MESSAGE,))
        self._body_end = Markers(_BODY_ENDS)
        self._call_end = Markers((*_BODY_ENDS, "\\."))
        self._texts: dict[_Part, list[str]] = {}
        self._calls = ParsedCalls()
        self._begun: set[_Part] = set()
        """Kinds of text that the output has."""
        self._is_first_text = True
        """Whether the open message has no text yet."""
        self.num_calls = 0

    def feed(self, text: str, is_last: bool = False, *, is_finished: bool = False) -> Parsed:
        """Parse more text. With `is_last` nothing is held back; why the output ends is of no matter here."""
        text, self._buffer = self._buffer + text, ""
        self._texts = {_Part.REASONING: [], _Part.CONTENT: []}
        position: int | None = 0
        while position is not None:
            match self._part:
                case _Part.BOUNDARY:
                    position = self._leave_boundary(text, position, is_last)
                case _Part.HEADER:
                    position = self._read_header(text, position, is_last)
                case _Part.CALL:
                    position = self._read_call(text, position, is_last)
                case _Part.ARGUMENTS:
                    position = self._read_arguments(text, position, is_last)
                case _:
                    position = self._read_body(text, position, is_last)
            if self._reread:
                text, self._reread, position = self._reread, "", 0
        if is_last and self._part is _Part.HEADER:
            self._write(_Part.CONTENT, self._header)
        if is_last and self._part is _Part.CALL:
            self._end_call(is_closed=False)
        calls, arguments = self._calls.take()
        self.num_calls += len(calls)
        reasoning, content = ("".join(self._texts[part]) for part in (_Part.REASONING, _Part.CONTENT))
        return Parsed(reasoning, content, calls, arguments)

    def _leave_boundary(self, text: str, position: int, is_last: bool) -> int | None:
        rest = text[position : position + 32]
        if not rest:
            return None
        if any(rest.startswith(start) for start in _HEADER_STARTS):
            self._part, self._header = _Part.HEADER, ""
            return position
        if not is_last and any(start.startswith(rest) for start in _HEADER_STARTS):
            self._buffer = text[position:]
            return None
        self._open(_Part.CONTENT)
        return position

    def _read_header(self, text: str, position: int, is_last: bool) -> int | None:
        found = self._message_end.search(text, position)
        end = len(text) if found is None else found.end()
        if len(self._header) + end - position > _MAX_HEADER_CHARS:
            # A header has no such length: what there is of it is content.
            taken = _MAX_HEADER_CHARS - len(self._header)
            header, self._header = self._header + text[position : position + taken], ""
            self._open(_Part.CONTENT)
            self._write(_Part.CONTENT, header)
            return position + taken
        if found is None:
            overlap = 0 if is_last else self._message_end.overlap(text, position)
            self._header += text[position : end - overlap]
            self._buffer = text[end - overlap :]
            return None
        self._header += text[position:end]
        channel = self._header.partition(CHANNEL)[2].split("<|", 1)[0].split(maxsplit=1)[:1]
        to = recipient(self._header)
        if to and self._tools is not None and self._tools.function(to):
            self._part, self._call = _Part.CALL, [self._header]
            self._head = self._header if self._num_rereads < _MAX_REREAD_CALLS else None
        elif channel == ["analysis"] or to:
            self._open(_Part.REASONING)
        else:
            self._open(_Part.CONTENT)
        return end

    def _read_body(self, text: str, position: int, is_last: bool) -> int | None:
        found = self._body_end.search(text, position)
        end = len(text) if found is None else found.start()
        if found is None and not is_last:
            end -= self._body_end.overlap(text, position)
        self._write(self._part, text[position:end])
        if found is None:
            self._buffer = text[end:]
            return None
        self._part = _Part.BOUNDARY
        return end if found.group() in (START, CHANNEL) else found.end()

    def _leave_head(self, text: str, position: int) -> int | None:
        """Begin the open call if its opening is complete; return where its arguments go on, or None."""
        assert self._tools is not None
        assert self._head is not None
        before = len(self._head)
        self._head += text[position : position + len(self._header) + _MAX_HEAD_CHARS - before]
        opening = self._tools.opening(self._head)
        if opening is None:
            if len(self._head) >= len(self._header) + _MAX_HEAD_CHARS:
                self._head = None
            return None
        if opening.end < before:
            self._reread = self._head[opening.end : before] + text[position:]
        self._head, self._call, self._part = None, [], _Part.ARGUMENTS
        self._calls.begin(ParsedCall(opening.name, "", opening.id))
        self._reader = self._tools.argument_reader(opening)
        self._is_in_string, self._passed = False, None
        return position + max(0, opening.end - before)

    def _read_arguments(self, text: str, position: int, is_last: bool) -> int | None:
        assert self._reader is not None
        piece = text[position : position + _MAX_PIECE]
        end = position + len(piece)
        written, rest = self._reader.feed(piece, is_last and end == len(text))
        self._calls.write(written)
        if rest is None:
            return end if end < len(text) else None
        self._num_rereads += self._reader.gives_back
        self._part = _Part.BOUNDARY
        if len(rest) <= len(piece):
            return end - len(rest)
        self._reread = rest + text[end:]
        return None

    def _read_call(self, text: str, start: int, is_last: bool) -> int | None:
        if self._head is not None and (begin := self._leave_head(text, start)) is not None:
            return begin
        trusts_strings = self._num_rereads < _MAX_REREAD_CALLS
        position = start
        while found := (_IN_STRING if self._is_in_string else _OUTSIDE).search(text, position):
            position = found.end()
            match found.lastgroup:
                case "quote":
                    self._is_in_string = not self._is_in_string and trusts_strings
                case "mark" if not self._is_in_string:
                    self._call.append(text[start : found.start()])
                    if self._passed is not None and not self._is_call():
                        self._end_at_passed_mark(text[found.start() :])
                        return None
                    self._end_call(is_closed=True)
                    self._part = _Part.BOUNDARY
                    return found.start() if found.group() in (START, CHANNEL) else position
                case "mark" if self._passed is None:
                    self._passed = sum(map(len, self._call)) + found.start() - start
                case "broken":
                    if self._passed is not None:
                        self._end_at_passed_mark(text[start:])
                        return None
                    self._is_in_string = trusts_strings = False
                    self._num_rereads = _MAX_REREAD_CALLS
        if is_last and self._is_in_string and self._passed is not None:
            self._end_at_passed_mark(text[start:])
            return None
        held = 0 if is_last else self._call_end.overlap(text, position)
        self._call.append(text[start : len(text) - held])
        self._buffer = text[len(text) - held :]
        return None

    def _end_at_passed_mark(self, rest: str) -> None:
        """End the call at the first mark within a string; `rest` is what was not added to it."""
        assert self._passed is not None
        text, passed = "".join(self._call) + rest, self._passed
        self._num_rereads += 1
        self._call = [text[:passed]]
        self._end_call(is_closed=True)
        self._part = _Part.BOUNDARY
        found = self._body_end.search(text, passed)
        assert found is not None
        self._reread = text[passed if found.group() in (START, CHANNEL) else found.end() :]

    def _is_call(self) -> bool:
        assert self._tools is not None
        return bool(self._tools.parse("".join(self._call)))

    def _end_call(self, *, is_closed: bool) -> None:
        assert self._tools is not None
        text, self._call = "".join(self._call), []
        self._is_in_string, self._passed = False, None
        calls = self._tools.parse(text) if is_closed else self._tools.parse_unclosed(text)
        if calls:
            self._calls.add(calls)
        else:
            self._open(_Part.CONTENT)
            self._write(_Part.CONTENT, text)

    def _open(self, part: _Part) -> None:
        self._part, self._is_first_text = part, True

    def _write(self, part: _Part, text: str) -> None:
        if not text:
            return
        if self._is_first_text and part in self._begun:
            self._texts[part].append("\n")
        self._begun.add(part)
        self._is_first_text = False
        self._texts[part].append(text)


class OpenAIToolParser(ToolParser):
    """gpt-oss: calls are messages to `functions.NAME`, which `HarmonyParser` reads by this parser."""

    other_markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    call_form = ToolCallForm(
        begin=f" to=functions.{{name}}{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}", end="", is_single=True
    )
    """The token that ends a call ends the output, too."""

    def scanner(self, start: str) -> Scanner:
        return MarkerScanner(CALL)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        """Read a message with its header."""
        body = text.removesuffix(CALL)
        return self.parse_unclosed(body + "{}" if body.rstrip().endswith(MESSAGE) else body)

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        header, mark, body = text.partition(MESSAGE)
        name = self.function(recipient(header))
        arguments = json_arguments(body)
        return (ParsedCall(name, arguments),) if mark and name and arguments is not None else None

    def opening(self, text: str) -> CallOpening | None:
        """Return the call that a message with its header begins."""
        header, mark, body = text.partition(MESSAGE)
        name = self.function(recipient(header))
        found = _BODY.match(body) if mark and name else None
        return CallOpening(name, len(header) + len(mark) + found.end()) if found and name else None

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((END, CALL, RETURN, START, CHANNEL), ((END, CALL, RETURN),))

    def function(self, to: str) -> str | None:
        """Return the function to which a recipient refers; None if it is no function of the request."""
        name = to.removeprefix(_FUNCTIONS)
        is_known = to.startswith(_FUNCTIONS) or name in self._names
        return name if name and is_known and is_text(name) else None


def recipient(header: str) -> str:
    """Return a message's recipient; empty if it has none."""
    _, mark, rest = header.partition("to=")
    return rest.split("<|", 1)[0].split(maxsplit=1)[0] if mark and rest.strip() else ""
