"""Parsed output: what a piece of generated text adds to a message, and readers of a call's arguments.

A reader reads arguments while the model writes them, up to the call's end. It is made once it is certain that a call
has begun. What it returns is JSON text of an object, in pieces whose concatenation does not depend on how the text was
cut. JSON that a model writes is passed on as it is written, so a malformed call has malformed arguments.

Invariant: reading is linear in the text. A reader may once return text that it had taken for an argument, because
nothing has ended it; then `gives_back` is true, and its owner bounds how often that happens.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from argosy_engine.parsers.scanners import Markers


class ParsedCall(NamedTuple):
    """A tool call, with as much of its arguments as has been read."""

    name: str
    arguments: str
    """Arguments as the JSON text of an object. They end early where the output does, and are not valid JSON if the
    model has written something else into a call that had begun."""
    id: str = ""
    """The id that the model wrote; empty if its form has none."""


class Parsed(NamedTuple):
    """What a piece of text added to the message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()
    """Calls that began."""
    arguments: str = ""
    """What was added to the arguments of the last call before these."""


class ParsedCalls:
    """Collects the calls of one piece of text."""

    def __init__(self) -> None:
        self._calls: list[ParsedCall] = []
        self._arguments: list[str] = []
        """Parts of the last call's arguments; of a call that began earlier while `_calls` is empty."""
        self._continued = ""

    def begin(self, call: ParsedCall) -> None:
        """Add a call; what is written from now on are its arguments, after those it has."""
        self._end()
        self._calls.append(call)

    def add(self, calls: Iterable[ParsedCall]) -> None:
        """Add complete calls."""
        for call in calls:
            self.begin(call)

    def write(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        self._arguments.append(arguments)

    def take(self) -> tuple[tuple[ParsedCall, ...], str]:
        """Return the calls, and what was added to the arguments of the call before them; forget both."""
        self._end()
        calls, continued = tuple(self._calls), self._continued
        self._calls, self._continued = [], ""
        return calls, continued

    def _end(self) -> None:
        arguments, self._arguments = "".join(self._arguments), []
        if not self._calls:
            self._continued += arguments
        elif arguments:
            self._calls[-1] = self._calls[-1]._replace(arguments=self._calls[-1].arguments + arguments)


def arguments_text(value: Any) -> str | None:
    """Return arguments as JSON text; None if they are no object, or JSON or text cannot express them."""
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (
        ValueError,
        RecursionError,
    ):  # NaN and infinities, which Python's parser accepts but JSON does not have
        return None
    # Half of a surrogate pair can only be written as an escape.
    return text if is_text(text) else json.dumps(value)


def is_text(value: str) -> bool:
    """Whether UTF-8 can express it: no half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


MAX_OPENING_CHARS = 512
"""Characters of a call in which its arguments must begin for them to be read as they are written."""
MAX_SPACE = 16
"""Maximum white space before a mark that belongs to it."""
OBJECT_START = rf"(?=\{{\s{{0,{MAX_SPACE}}}[\"}}])"
"""Pattern of what is certain to begin an object."""
FUNCTION_NAME = r"[A-Za-z0-9_.-]{1,64}"


_AFTER_STRING = re.compile(r"(?P<after>[^ \t\r\n])")
_VALUES_OF_OTHER_TYPES = ("1", "true", "null", "{}", "[]")
"""Texts all of which are texts only for an argument that can be nothing else."""


class CallOpening(NamedTuple):
    """The part of a call before its arguments."""

    name: str
    end: int
    """Offset at which the arguments begin."""
    id: str = ""
    """The id that the model wrote; empty if its form has none."""


class ArgumentReader(ABC):
    """Reader of one call's arguments."""

    gives_back = False
    """Whether the rest contains text that was taken for an argument at first."""

    @abstractmethod
    def feed(self, text: str, is_last: bool) -> tuple[str, str | None]:
        """Read more text.

        Args:
            is_last: whether the output ends with it.

        Returns:
            What it adds to the arguments, and the text after the call; None while the call goes on. It does not go on
            after the last text.
        """

    def missing_end(self) -> str:
        """Return what closes the arguments of a call whose end is missing, although the model has ended the output."""
        return ""


class CallEnd:
    """Reads the marks after a call's arguments, each of which may be missing.

    Args:
        marks: in their order; those of an inner tuple are alternatives.
    """

    def __init__(self, marks: Sequence[tuple[str, ...]]) -> None:
        self._marks = list(marks)
        self._text = ""

    def feed(self, text: str, is_last: bool) -> str | None:
        """Return the text after the marks; None if more text is needed to find them."""
        self._text += text
        while self._marks:
            begin = 0
            while begin < min(len(self._text), MAX_SPACE) and self._text[begin].isspace():
                begin += 1
            rest = self._text[begin : begin + 64]
            found = next((mark for mark in self._marks[0] if rest.startswith(mark)), None)
            if found is not None:
                self._text = self._text[begin + len(found) :]
            elif not is_last and any(mark.startswith(rest) for mark in self._marks[0]):
                return None
            del self._marks[0]
        text, self._text = self._text, ""
        return "" if is_last and text.isspace() else text


class JsonArguments(ArgumentReader):
    """Reads an object that the model writes as JSON.

    A mark ends the arguments, except within a string, where it may be text: then it is text if the string is closed
    and followed by what may follow a string. Otherwise it has ended the call. In a string with control characters,
    which JSON does not have, nothing tells where strings end; from there on a mark ends the call.

    Args:
        ends: marks that end the arguments wherever they stand outside a string. They are not part of them.
        closing: marks after the arguments, as `CallEnd` takes them.
    """

    def __init__(self, ends: Sequence[str], closing: Sequence[tuple[str, ...]]) -> None:
        mark = "|".join(map(re.escape, ends)) or "(?!)"
        self._outside = re.compile(rf'(?P<mark>{mark})|(?P<quote>")|(?P<bracket>[\[\]{{}}])')
        self._inside = re.compile(rf'(?P<mark>{mark})|(?P<quote>")|\\(?s:.)|(?P<control>[\x00-\x1f])')
        self._begun = Markers((*ends, "\\."))
        self._ends = ends
        self._end = CallEnd(closing)
        self._tail = ""
        """End of the text so far that may be the beginning of a mark or an escape."""
        self._brackets: list[str] = []
        """Closing brackets that are expected, the next one last."""
        self._is_in_string = False
        self._is_broken = False
        """Whether a string has had a control character."""
        self._doubtful: list[str] | None = None
        """Text from a mark within the open string on."""
        self._is_after_string = False
        """Whether the string of the doubtful text has been closed."""
        self._has_ended = False

    def feed(self, text: str, is_last: bool) -> tuple[str, str | None]:
        if self._has_ended:
            return "", self._end.feed(text, is_last)
        text, self._tail = self._tail + text, ""
        written: list[str] = []
        begin = position = 0
        while found := self._pattern().search(text, position):
            position = found.end()
            match found.lastgroup:
                case "after" if found.group() in ":,]}":
                    assert self._doubtful is not None
                    written += self._doubtful
                    self._doubtful, self._is_after_string = None, False
                    position = found.start()
                case "after":
                    return self._give_back(written, text[begin:], is_last)
                case "quote":
                    self._is_in_string = not self._is_in_string
                    self._is_after_string = self._doubtful is not None
                case "control" if self._doubtful is not None:
                    return self._give_back(written, text[begin:], is_last)
                case "control":
                    self._is_broken = True
                case "mark" if not self._is_in_string or self._is_broken:
                    written.append(text[begin : found.start()])
                    return self._close(written, text[found.start() :], is_last)
                case "mark" if self._doubtful is None:
                    written.append(text[begin : found.start()])
                    self._doubtful, begin = [], found.start()
                case "bracket" if not is_last and self._begins_mark(text[found.start() :]):
                    position = found.start()
                    break
                case "bracket":
                    self._count_bracket(found.group())
                    if not self._brackets:
                        written.append(text[begin:position])
                        return self._close(written, text[position:], is_last)
        held = 0 if is_last else self._begun.overlap(text, position)
        end = len(text) - held
        if is_last and self._doubtful is not None:
            return self._give_back(written, text[begin:], is_last)
        (written if self._doubtful is None else self._doubtful).append(text[begin:end])
        self._tail = text[end:]
        return "".join(written), "" if is_last else None

    def _pattern(self) -> re.Pattern[str]:
        if self._is_after_string:
            return _AFTER_STRING
        return self._inside if self._is_in_string else self._outside

    def _begins_mark(self, text: str) -> bool:
        return any(mark.startswith(text) for mark in self._ends)

    def _count_bracket(self, bracket: str) -> None:
        if bracket in "{[":
            self._brackets.append("}" if bracket == "{" else "]")
        elif self._brackets[-1] == bracket:
            self._brackets.pop()

    def _give_back(self, written: list[str], rest: str, is_last: bool) -> tuple[str, str | None]:
        """End the call at the mark with which the doubtful text begins."""
        assert self._doubtful is not None
        self.gives_back = True
        return self._close(written, "".join((*self._doubtful, rest)), is_last)

    def _close(self, written: list[str], rest: str, is_last: bool) -> tuple[str, str | None]:
        self._has_ended, self._doubtful = True, None
        return "".join(written), self._end.feed(rest, is_last)


class ConvertedArguments(ArgumentReader):
    """Base of readers of arguments that the model writes as plain text between marks, each added once it is complete.

    The call ends at its mark, or at anything else that is no argument. The output's end cuts off an argument, and the
    object is not closed; but if a call begins in that argument, its end mark is missing, and it is given back. Of
    arguments of one name the first counts: a stream has sent it.

    Args:
        convert: makes JSON's value of the text of an argument, given its name.
    """

    argument: ClassVar[re.Pattern[str]]
    """What stands before a value, with the argument's name as group `key`. Has at most `max_head_chars`."""
    max_head_chars: ClassVar[int]
    end: ClassVar[str]
    """Mark after the arguments."""
    closing: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Marks after that, as `CallEnd` takes them."""
    starts: ClassVar[tuple[str, ...]]
    """Marks that begin a call."""
    value_marks: ClassVar[Markers]
    """Marks that end a value."""

    def __init__(self, convert: Callable[[str, str], Any]) -> None:
        self._convert = convert
        self._names: set[str] = set()
        self._text = ""
        """Text that has not been read, or may be the beginning of a mark."""
        self._head = ""
        """What stands before the open value."""
        self._key: str | None = None
        """Name of the open value's argument."""
        self._value: list[str] = []
        self._end: CallEnd | None = None

    @abstractmethod
    def may_go_on(self, head: str) -> bool:
        """Whether text without white space before it may be the beginning of an argument, or of the end mark."""

    @abstractmethod
    def value_end(self, text: str, position: int, is_last: bool) -> tuple[int, int | None]:
        """Return where in the text from `position` on the open value ends, and where to read on; or from where on the
        text may belong to an end, and None."""

    def feed(self, text: str, is_last: bool) -> tuple[str, str | None]:
        if self._end is not None:
            return "", self._end.feed(text, is_last)
        text, self._text = self._text + text, ""
        written: list[str] = []
        position: int | None = 0
        while position is not None:
            if self._key is not None:
                position = self._read_value(written, text, position, is_last)
                continue
            head = text[position : position + self.max_head_chars]
            begin = position + len(head) - len(head.lstrip())
            if (found := self.argument.match(head)) is not None:
                self._head, self._key, self._value = found.group(), found["key"], []
                position += found.end()
            elif text.startswith(self.end, begin):
                self._end = CallEnd(self.closing)
                written.append(self._last())
                return "".join(written), self._end.feed(text[begin + len(self.end) :], is_last)
            elif len(head) == self.max_head_chars or not self.may_go_on(head.lstrip()):
                return "".join((*written, self._last())), text[position:]
            else:
                self._text, position = text[position:], None
        if not is_last:
            return "".join(written), None
        if self._key is None:
            return "".join(written), self._text
        value = "".join((*self._value, self._text))
        if any(start in value for start in self.starts):
            self.gives_back = True
            return "".join(written), self._head + value
        return "".join((*written, self._begun_entry(value))), ""

    def missing_end(self) -> str:
        return self._last() if self._end is None and self._key is None else ""

    def _begun_entry(self, text: str) -> str:
        """Return the beginning of an argument whose value the output's end cuts off; of the value only what a whole one
        would begin with."""
        assert self._key is not None
        name = self._key.strip()
        if name in self._names:
            return ""
        begun = ""
        if all(isinstance(self._convert(name, value), str) for value in _VALUES_OF_OTHER_TYPES):
            text = text[: len(text) - self.value_marks.overlap(text, 0)]
            begun = json.dumps(self._convert(name, text), ensure_ascii=False)[:-1]
        return f"{', ' if self._names else '{'}{json.dumps(name, ensure_ascii=False)}: {begun}"

    def _read_value(self, written: list[str], text: str, position: int, is_last: bool) -> int | None:
        assert self._key is not None
        end, after = self.value_end(text, position, is_last)
        self._value.append(text[position:end])
        if after is None:
            self._text = text[end:]
            return None
        name, value = self._key.strip(), "".join(self._value)
        self._key = None
        if name in self._names:
            return after
        entry = arguments_text({name: self._convert(name, value)}) or arguments_text({name: value})
        assert entry is not None
        written.append((", " if self._names else "{") + entry[1:-1])
        self._names.add(name)
        return after

    def _last(self) -> str:
        """Return what closes the object."""
        return "}" if self._names else "{}"


def opening_of(found: re.Match[str] | None) -> CallOpening | None:
    """Return the opening that a pattern's groups `name` and, perhaps, `id` describe."""
    if found is None:
        return None
    groups: dict[str, Any] = found.groupdict()
    return CallOpening(groups["name"], found.end(), groups.get("id") or "")
