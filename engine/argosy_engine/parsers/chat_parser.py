"""ChatParser: splits generated text into reasoning, content and tool calls, as it streams.

A reasoning parser names the marks around the reasoning, a tool parser the form of the calls; this module reads both in
one pass. The scanners are written by hand: linear time, no pattern that backtracks (CVE-2025-48887), nothing is
evaluated (CVE-2025-9141).

A call begins once its name and the beginning of its arguments are certain; its arguments follow as they are written.
Calls of which that cannot be told early are read when they are complete.

Invariants: the concatenated deltas do not depend on how the text was split, so streamed and unary responses agree.
Text that begins no call is content, or reasoning where it stands in the reasoning; nothing but marks and the white
space around them is dropped. The model may mention a call in its reasoning: one counts there only if it is complete and
the output ends with it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar

from argosy_engine.parsers.parsed_output import (
    MAX_OPENING_CHARS,
    ArgumentReader,
    Parsed,
    ParsedCall,
    ParsedCalls,
)
from argosy_engine.parsers.scanners import (
    NO_CALL,
    DroppedMarks,
    EnclosingScanner,
    Markers,
    MarkerScanner,
    Scanner,
)
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser

_MAX_TRIMMED = 16
"""Maximum white space around a marker that belongs to it, so that the output of a model that writes only newlines is
not held back for ever."""

_MAX_PIECE = 4096
"""Maximum characters of a call that are read at once, so that short calls in a long text take linear time."""
_MAX_REREAD_CALLS = 4
"""Calls of an output that may be read past an end marker in vain, after which the text is read again."""


class _State(Enum):
    START = auto()
    """Nothing but white space so far; reasoning may begin."""
    REASONING = auto()
    BETWEEN = auto()
    """Where a call may begin that needs no marker, or the next call of a section."""
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()
    """In the arguments of a call that has begun."""
    DRAFT = auto()
    """After a call in the reasoning, which counts if nothing but calls and the marks around them follow."""


class ChatParser:
    """Reads one output.

    Args:
        reasoning_parser: splits reasoning off the content; None: there is none.
        tool_parser: turns calls into tool calls; None if the request has no tools.
        starts_open: whether an output without the reasoning's start marker begins with reasoning nevertheless.
        is_reasoning: whether the prompt has opened the reasoning, so that the text begins inside it.
        calls_end_reasoning: whether complete calls inside the reasoning count if the output ends with them. Off if a
            grammar constrains the output, because the grammar begins after the reasoning.
    """

    def __init__(
        self,
        *,
        reasoning_parser: ReasoningParser | None = None,
        tool_parser: ToolParser | None = None,
        starts_open: bool = False,
        is_reasoning: bool = False,
        calls_end_reasoning: bool = False,
    ) -> None:
        self._think = reasoning_parser or ReasoningParser()
        self._starts_of_reasoning = (self._think.start, *self._think.other_starts)
        self._ends_of_reasoning = (self._think.text_end or self._think.end, *self._think.other_ends)
        self._answer_marks = (
            DroppedMarks(self._think.answer_marks, _MAX_TRIMMED) if self._think.answer_marks else None
        )
        self._tools = tool_parser
        self._starts_open = starts_open
        self._newlines_to_skip = _MAX_TRIMMED if is_reasoning else 0
        """Number of newlines after a marker that still belong to it."""
        self._is_after_call = False
        """Whether what comes next follows a call."""
        self._between = ""
        """Section's start marker and separators, until a call follows."""
        self._buffer = ""
        """Text that may be the beginning of a marker, and the white space before it."""
        starts = tool_parser.starts if tool_parser is not None else ()
        section = tool_parser.section if tool_parser is not None else None
        self._content_markers = Markers((*starts, section[0]) if section else starts)
        self._call_starts = (*tool_parser.first_starts, *starts) if tool_parser is not None else ()
        call_markers = self._content_markers.texts if calls_end_reasoning else ()
        self._reasoning_markers = Markers((*self._ends_of_reasoning, *call_markers))
        self._call: list[str] = []
        """Text of the open call, from its start marker on."""
        self._head: str | None = None
        """Beginning of the open call, while it may turn out to have an opening."""
        self._reader: ArgumentReader | None = None
        self._has_passed = False
        """Whether the open call goes on after an end marker, which belongs to an argument."""
        self._num_reread = 0
        self._again = ""
        """Text of earlier pieces that is read again, before the rest of the current one."""
        self._scanner: Scanner | None = None
        self._in_thought = False
        """Whether the call that may begin, or the open one, stands in the reasoning."""
        self._ends_of_thought: list[MarkerScanner] = []
        """What finds the end of the reasoning while an open call stands in it."""
        self._drafts: list[str] = []
        """Text of the calls that stand last in the reasoning so far."""
        self._draft_calls: list[ParsedCall] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._has_content = False
        """Whether earlier pieces had content."""
        self._rest_is_content = False
        """Whether nothing but content can follow, which needs no reading."""
        self._gap: str | None = None
        """Newlines after the last call, if there was content before it, from which they separate what follows."""
        self._calls = ParsedCalls()
        self._state = _State.REASONING if is_reasoning else _State.START
        if not is_reasoning and reasoning_parser is None:
            self._begin_content()
        self._is_finished = False
        self.num_calls = 0

    def feed(self, text: str, is_last: bool = False, *, is_finished: bool = False) -> Parsed:
        """Parse more text. With `is_last` nothing is held back.

        Args:
            is_finished: whether the model has ended the output itself, so that the last call lacks at most its end.
        """
        if self._rest_is_content:
            return Parsed("", self._without_answer_marks(text, is_last))
        text, self._buffer = self._buffer + text, ""
        self._reasoning, self._content = [], []
        self._is_finished = is_finished
        position: int | None = 0
        while position is not None:
            position = self._advance(text, position, is_last)
            if position is None and is_last and self._state is _State.CALL:
                self._end_call("", is_closed=False)
                position = len(text)
            if self._again and position is not None:
                text, position, self._again = self._again + text[position:], 0, ""
        if is_last and self._state is _State.DRAFT:
            self._calls.add(self._draft_calls)
        calls, arguments = self._calls.take()
        self.num_calls += len(calls)
        content = self._without_answer_marks("".join(self._content), is_last)
        self._has_content = self._has_content or bool(content)
        return Parsed("".join(self._reasoning), content, calls, arguments)

    def _without_answer_marks(self, content: str, is_last: bool) -> str:
        return content if self._answer_marks is None else self._answer_marks.feed(content, is_last)

    def _advance(self, text: str, position: int, is_last: bool) -> int | None:
        """Read on from `position`; return where to continue in another state, or None if all is read."""
        match self._state:
            case _State.START:
                return self._leave_start(text, position, is_last)
            case _State.REASONING:
                return self._take_until(self._reasoning_markers, self._reasoning, text, position, is_last)
            case _State.CONTENT:
                return self._take_until(self._content_markers, self._content, text, position, is_last)
            case _State.BETWEEN:
                return self._leave_between(text, position, is_last)
            case _State.CALL:
                return self._read_call(text, position)
            case _State.ARGUMENTS:
                return self._read_arguments(text, position, is_last)
            case _State.DRAFT:
                return self._leave_draft(text, position, is_last)

    def _leave_start(self, text: str, position: int, is_last: bool) -> int | None:
        begin = position
        while begin < min(len(text), position + _MAX_TRIMMED + 1) and text[begin].isspace():
            begin += 1
        if begin - position <= _MAX_TRIMMED:
            for start in self._starts_of_reasoning:
                if text.startswith(start, begin):
                    self._enter(_State.REASONING)
                    return begin + len(start)
                if not is_last and start.startswith(text[begin : begin + len(start)]):
                    self._buffer = text[position:]
                    return None  # may still become reasoning
        if self._starts_open:
            self._enter(_State.REASONING)
        else:
            self._begin_content()
        return position

    def _begin_content(self) -> None:
        self._is_after_call = False
        is_call_first = (
            self._tools is not None and bool(self._tools.first_starts) and not self._tools.needs_section
        )
        self._state = _State.BETWEEN if is_call_first else _State.CONTENT

    def _take_until(
        self, markers: Markers, into: list[str], text: str, position: int, is_last: bool
    ) -> int | None:
        """Move the text before the first marker to `into`, without the newlines around markers.

        Without a marker, holds back what may be the beginning of one and the newlines before it.
        """
        while self._newlines_to_skip and text.startswith("\n", position):
            position += 1
            self._newlines_to_skip -= 1
            if self._gap is not None:
                self._gap += "\n"
        found = markers.search(text, position)
        if found is not None:
            self._append(into, _without_last_newlines(text[position : found.start()]))
            self._enter_marker(found.group())
            return found.end()
        end = len(text)
        if markers and not is_last:
            end -= markers.overlap(text, position)
            end -= _last_newlines(text, position, end)
        if end > position:
            self._newlines_to_skip = 0
            self._rest_is_content = not markers and self._state is _State.CONTENT
        self._append(into, text[position:end])
        self._buffer = text[end:]
        return None

    def _append(self, into: list[str], text: str) -> None:
        """Append text, after the newlines that separate it from what stands before the calls."""
        if text and self._gap is not None:
            text, self._gap = self._gap + text, None
        into.append(text)

    def _enter_marker(self, marker: str) -> None:
        if self._state is _State.REASONING and marker in self._ends_of_reasoning:
            self._enter_content()
            return
        assert self._tools is not None
        self._in_thought = self._state is _State.REASONING
        if self._tools.section and marker == self._tools.section[0]:
            self._between, self._is_after_call = marker, False
            self._enter(_State.BETWEEN)
        else:
            self._open_call(marker)

    def _enter_content(self) -> None:
        self._enter(_State.CONTENT)
        self._begin_content()

    def _leave_between(self, text: str, position: int, is_last: bool) -> int | None:
        assert self._tools is not None
        separators = self._tools.separators + " \t\r\n"
        begin = position
        while begin < min(len(text), position + _MAX_TRIMMED) and text[begin] in separators:
            begin += 1
        for start in self._call_starts:
            if text.startswith(start, begin):
                self._between += text[position:begin]
                self._open_call(start)
                return begin + len(start)
        section = self._tools.section
        if section and (self._is_after_call or self._between) and text.startswith(section[1], begin):
            # A section without calls leaves nothing, either.
            self._enter(_State.REASONING if self._in_thought else _State.CONTENT)
            self._between, self._in_thought = "", False
            return begin + len(section[1])
        rest = text[begin : begin + 64]
        expected = (*self._call_starts, *(section or ()))
        if not is_last and any(marker.startswith(rest) for marker in expected):
            self._buffer = text[position:]
            return None
        if self._between:
            self._append(self._reasoning if self._in_thought else self._content, self._between)
            self._between, self._newlines_to_skip = "", 0
        self._state = _State.REASONING if self._in_thought else _State.CONTENT
        self._in_thought = False
        return position

    def _leave_draft(self, text: str, position: int, is_last: bool) -> int | None:
        assert self._tools is not None
        separators = self._tools.separators + " \t\r\n"
        begin = position
        while begin < len(text) and text[begin] in separators:
            begin += 1
        self._drafts.append(text[position:begin])
        if begin == len(text):
            return None
        for start in self._call_starts:
            if text.startswith(start, begin):
                self._in_thought = True
                self._open_call(start)
                return begin + len(start)
        section = self._tools.section or ()
        for mark in section:
            if text.startswith(mark, begin):
                self._drafts.append(mark)
                return begin + len(mark)
        for end in self._ends_of_reasoning:
            if text.startswith(end, begin):
                self._reasoning.append(_without_last_newlines(self._take_drafts()))
                self._enter_content()
                return begin + len(end)
        rest = text[begin : begin + 64]
        if not is_last and any(
            mark.startswith(rest) for mark in (*self._call_starts, *section, *self._ends_of_reasoning)
        ):
            self._buffer = text[begin:]
            return None
        self._reasoning.append(self._take_drafts())
        self._state, self._newlines_to_skip = _State.REASONING, 0
        return begin

    def _take_drafts(self) -> str:
        """Return the calls that stand last in the reasoning as text, because they turned out to be mentioned."""
        text = "".join(self._drafts)
        self._drafts, self._draft_calls = [], []
        return text

    def _open_call(self, start: str) -> None:
        assert self._tools is not None
        self._state = _State.CALL
        self._scanner = self._tools.scanner(start)
        self._call = [start]
        self._head = None if self._in_thought or self._num_reread >= _MAX_REREAD_CALLS else start
        self._has_passed = False
        self._ends_of_thought = (
            [MarkerScanner(end) for end in self._ends_of_reasoning] if self._in_thought else []
        )

    def _leave_head(self, text: str, position: int) -> int | None:
        """Begin the open call if its opening is complete; return where its arguments go on, or None."""
        assert self._tools is not None
        assert self._head is not None
        before = len(self._head)
        self._head += text[position : position + MAX_OPENING_CHARS - before]
        opening = self._tools.opening(self._head)
        if opening is None:
            if len(self._head) >= MAX_OPENING_CHARS:
                self._head = None
            return None
        self._again = self._head[opening.end : before]
        self._head, self._call, self._between = None, [], ""
        self._calls.begin(ParsedCall(opening.name, "", opening.id))
        self._reader = self._tools.argument_reader(opening)
        self._state = _State.ARGUMENTS
        return position + max(0, opening.end - before)

    def _read_arguments(self, text: str, position: int, is_last: bool) -> int | None:
        assert self._reader is not None
        piece = text[position : position + _MAX_PIECE]
        end = position + len(piece)
        written, rest = self._reader.feed(piece, is_last and end == len(text))
        self._calls.write(written)
        if rest is None:
            return end if end < len(text) else None
        if self._is_finished and not rest.strip() and (missing := self._reader.missing_end()):
            self._calls.write(missing)
            rest = ""
        self._num_reread += self._reader.gives_back
        self._after_calls()
        taken = max(0, len(rest) - len(piece))
        self._again = rest[:taken]
        return end - len(rest) + taken

    def _read_call(self, text: str, position: int) -> int | None:
        if self._head is not None and (begin := self._leave_head(text, position)) is not None:
            return begin
        piece = text[position : position + _MAX_PIECE]
        thought_end = min(
            (end for scanner in self._ends_of_thought if (end := scanner.feed(piece, 0)) >= 0), default=-1
        )
        piece = piece[:thought_end] if thought_end >= 0 else piece
        end = self._find_end(piece)
        if end == NO_CALL:
            self._give_back("".join(self._call))
            self._end_call("", is_closed=False)
            return position
        if thought_end >= 0 and not 0 <= end < thought_end:
            # A call counts in the reasoning only if it is complete before the reasoning ends.
            self._call.append(piece)
            call = "".join(self._call)
            mark = next(end for end in self._ends_of_reasoning if call.endswith(end))
            thought = self._take_drafts() + self._between + call.removesuffix(mark)
            self._reasoning.append(_without_last_newlines(thought))
            self._between, self._call, self._in_thought = "", [], False
            self._enter_content()
            return position + thought_end
        if end < 0:
            self._call.append(piece)
            position += len(piece)
            return position if position < len(text) else None
        self._end_call(piece[:end], is_closed=True)
        return position + end

    def _find_end(self, piece: str) -> int:
        """Read on in the open call; return the offset just after it, or what else its scanner returns.

        An end marker within a value ends the call if that makes it one, or if too many texts have been read again.
        """
        scanner = self._scanner
        assert scanner is not None
        end = scanner.feed(piece, 0)
        while end >= 0 and isinstance(scanner, EnclosingScanner) and scanner.is_inside:
            if not self._has_passed:
                call = "".join((*self._call, piece[:end]))
                if self._num_reread >= _MAX_REREAD_CALLS or self._calls_in(call, self._call[0], True)[0]:
                    break
                self._has_passed = True
            end = scanner.feed(piece, end)
        return end

    def _give_back(self, call: str) -> None:
        """Have the text of the open call read again, without the start marker, because it is no call."""
        start = self._call[0]
        self._again, self._call = call[len(start) :], [start]
        self._num_reread += self._has_passed
        self._has_passed = False

    def _end_call(self, last: str, *, is_closed: bool) -> None:
        """Read the call that ends with `last`, or turn its text back into content or reasoning."""
        assert self._tools is not None
        text = "".join((*self._call, last))
        start = self._call[0]
        calls, before = self._calls_in(text, start, is_closed)
        if self._has_passed and not calls:
            self._give_back(text)
            text = before = start
        in_thought, self._in_thought, self._call = self._in_thought, False, []
        into = self._reasoning if in_thought else self._content
        if before:
            # No call precedes the text, so that the marks before it are text as well.
            text_before = _without_last_newlines(before) if calls else before
            self._append(into, self._take_drafts() + self._between + text_before)
            self._between = ""
        between, self._between = self._between, ""
        if calls and in_thought:
            self._drafts.append(between + text[len(before) :])
            self._draft_calls += calls
            self._state = _State.DRAFT
            return
        if not calls:
            self._state, self._newlines_to_skip = (_State.REASONING if in_thought else _State.CONTENT), 0
            return
        self._calls.add(calls)
        self._after_calls()

    def _after_calls(self) -> None:
        assert self._tools is not None
        self._enter(_State.CONTENT)
        self._gap = "" if self._has_content or any(self._content) else None
        if self._tools.section or self._tools.separators:
            self._state, self._is_after_call = _State.BETWEEN, True

    def _calls_in(self, text: str, start: str, is_closed: bool) -> tuple[list[ParsedCall], str]:
        """Return the calls of a text, and the text before them, which is all of it if there are none.

        A start marker may have been mentioned before a call, or a call may lack its end marker: the text may contain
        several start markers, of which the last ones begin calls.
        """
        assert self._tools is not None
        parse = self._tools.parse if is_closed else self._tools.parse_unclosed
        whole = parse(text)
        if whole:
            return list(whole), ""
        begin = text.rfind(start, len(start)) if start in self._tools.starts else -1
        calls = parse(text[begin:]) if begin > 0 else None
        if not calls:
            return [], text
        found = [list(calls)]
        while begin > 0:
            end, begin = begin, text.rfind(start, 0, begin)
            more = self._tools.parse_unclosed(text[begin:end])
            if not more:
                begin = end
                break
            found.append(list(more))
        return [call for part in reversed(found) for call in part], text[:begin]

    def _enter(self, state: _State) -> None:
        self._state, self._newlines_to_skip = state, _MAX_TRIMMED


def _last_newlines(text: str, start: int, end: int) -> int:
    """Count the newlines at the end of `text[start:end]` that belong to a marker after them."""
    count = 0
    while count < min(_MAX_TRIMMED, end - start) and text[end - count - 1] == "\n":
        count += 1
    return count


def _without_last_newlines(text: str) -> str:
    return text[: len(text) - _last_newlines(text, 0, len(text))]


class ReasoningParser:
    """Reasoning between two markers, before the answer. A subclass per family of models, by vLLM's names."""

    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    other_starts: ClassVar[tuple[str, ...]] = ()
    other_ends: ClassVar[tuple[str, ...]] = ()
    """Texts that models write in the place of `start` and `end`."""
    is_prose: ClassVar[bool] = False
    """Whether the markers are sentences, which a tokenizer may divide in several ways: no grammar waits for them."""
    tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens within the markers, if these have other text."""
    end_before_calls: ClassVar[str | None] = None
    """What ends the reasoning before calls that a grammar requires, if it is not `end`."""
    message_ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a message of reasoning, if there may be several; their tokens are counted by these."""
    text_end: ClassVar[str | None] = None
    """What ends the reasoning in an output's text, if grammars wait for more than that."""
    answer_marks: ClassVar[tuple[str, ...]] = ()
    """Marks around the answer, which are dropped with the newlines around them."""
    starts_open: ClassVar[bool] = False
    """Whether an output without the start marker begins with reasoning, unless the prompt has closed it."""


class Qwen3ReasoningParser(ReasoningParser):
    """Qwen3: `<think>...</think>`, which the prompt or the model opens."""


class DeepSeekR1ReasoningParser(ReasoningParser):
    """DeepSeek R1: `<think>...</think>`, of which the model may leave out the first mark."""

    starts_open = True


class Glm45ReasoningParser(ReasoningParser):
    """GLM-4.5 to GLM-4.7: `<think>...</think>`, which the model opens."""


class Ernie45ReasoningParser(ReasoningParser):
    """ERNIE 4.5 Thinking: `<think>...</think>`, after which the answer may stand in `<response>` and `</response>`."""

    answer_marks = ("<response>", "</response>")


class GraniteReasoningParser(ReasoningParser):
    """Granite 3.2: `Here is my thought process:` and `Here is my response:`, or `Here's` in both."""

    start = "Here is my thought process:"
    end = "Here is my response:"
    other_starts = ("Here's my thought process:",)
    other_ends = ("Here's my response:",)
    is_prose = True


class CohereCommand3ReasoningParser(ReasoningParser):
    """Command R7B and Command A: `<|START_THINKING|>...<|END_THINKING|>`, before calls a plan; the answer stands
    between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`."""

    start = "<|START_THINKING|>"
    end = "<|END_THINKING|>"
    answer_marks: ClassVar[tuple[str, ...]] = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    tokens = answer_marks


class CohereCommand4ReasoningParser(CohereCommand3ReasoningParser):
    """Cohere's later models: the answer stands between `<|START_TEXT|>` and `<|END_TEXT|>`."""

    answer_marks = ("<|START_TEXT|>", "<|END_TEXT|>")
    tokens = answer_marks


class SolarOpenReasoningParser(ReasoningParser):
    """Solar Open: `<|think|>` to `<|end|>`; the answer is a message of its own, as calls are."""

    start = "<|think|>"
    end = "<|end|><|begin|>assistant<|content|>"
    text_end = "<|end|>"
    end_before_calls = "<|end|><|begin|>assistant"
    answer_marks = ("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>")
    tokens = ("<|begin|>", "<|content|>", "<|end|>", "<|flush|>")


class SeedOssReasoningParser(ReasoningParser):
    """Seed-OSS: `<seed:think>...</seed:think>`."""

    start = "<seed:think>"
    end = "</seed:think>"


class MistralReasoningParser(ReasoningParser):
    """Mistral (Magistral): `[THINK]...[/THINK]`, which are special tokens."""

    start = "[THINK]"
    end = "[/THINK]"


class Gemma4ReasoningParser(ReasoningParser):
    """Gemma 4: `<|channel>thought` and a line break, up to `<channel|>`."""

    start = "<|channel>thought\n"
    end = "<channel|>"
    tokens = ("<|channel>",)


class GptOssReasoningParser(ReasoningParser):
    """gpt-oss: the reasoning is a message in the `analysis` channel of OpenAI's Harmony format.

    The marks tell a grammar where it begins. The output itself is read by `HarmonyParser`.
    """

    start = "<|channel|>analysis<|message|>"
    end = "<|start|>assistant<|channel|>final<|message|>"
    end_before_calls = "<|start|>assistant"
    message_ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
