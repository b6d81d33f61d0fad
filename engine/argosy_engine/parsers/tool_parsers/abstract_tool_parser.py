"""ToolParser: how one family of models writes tool calls.

A tool parser names the markers with which a call begins, finds a call's end and reads a complete call. It may also tell
early that a call has begun, and read its arguments as they are written. `ChatParser` does the rest: it splits the
output, holds back what may become a marker, and turns what is no call into content. A parser is made for each choice of
a request.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from argosy_engine.parsers.parsed_output import (
    ArgumentReader,
    CallOpening,
    ParsedCall,
    arguments_text,
    is_text,
)
from argosy_engine.parsers.scanners import Scanner
from argosy_engine.structured.structural_tag import HERMES_CALLS, ToolCallForm

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolParser(ABC):
    """
    Args:
        tools: tool definitions of the request, as OpenAI's API has them.
    """

    starts: ClassVar[tuple[str, ...]] = ()
    """Markers that begin a call wherever they occur."""
    first_starts: ClassVar[tuple[str, ...]] = ()
    """Texts that begin a call at the beginning of the content, or after another call."""
    section: ClassVar[tuple[str, str] | None] = None
    """Markers around all calls of a message. They are removed with the calls."""
    needs_section: ClassVar[bool] = False
    """Whether `first_starts` begin a call within a section only."""
    separators: ClassVar[str] = ""
    """Characters that may separate calls, and are removed with them."""
    other_markers: ClassVar[tuple[str, ...]] = ()
    """Markers within a call, which the detokenizer must not drop if the tokenizer calls them special."""
    call_form: ClassVar[ToolCallForm] = HERMES_CALLS
    """The grammar of calls that `tool_choice` requires."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tools = tools
        functions = [tool.get("function") for tool in tools]
        self._names = {str(function.get("name")) for function in functions if isinstance(function, Mapping)}

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Return all markers of the form."""
        return (*cls.starts, *cls.other_markers, *(cls.section or ()))

    @abstractmethod
    def scanner(self, start: str) -> Scanner:
        """Return what finds the end of a call that begins with `start`, reading from after it."""

    @abstractmethod
    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        """Read a text from a start marker to the call's end, linear in its length; None if it is no call."""

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        """Read a text from a start marker to the output's end, which comes before the call's; None if it is no call."""
        return None

    def opening(self, text: str) -> CallOpening | None:
        """Return the call that a text from a start marker on begins, once it is certain that it is one.

        Args:
            text: ends at any point before or after the beginning of the arguments. The result must not depend on what
                follows them, and no beginning of what precedes them may be a whole call, or end the scanner.

        Returns:
            None if the text is no call, or not yet. Calls without an opening are read when they are complete.
        """
        return None

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        """Return what reads the arguments of a call that has begun, from its opening's end on."""
        raise NotImplementedError(f"{type(self).__name__} has openings, and so needs an argument_reader")

    def call_id(self, request_id: str, choice: int, number: int, call: ParsedCall) -> str:
        """Return a call's id: a function of the request's id, so that a resumed stream repeats it."""
        return call.id or f"call_{request_id}_{choice}_{number}"

    def is_function(self, name: str, *, is_unknown_allowed: bool) -> bool:
        """Whether a name that stands between marks, without quotes, is a function's and not prose.

        Args:
            is_unknown_allowed: whether the request may lack the function, because the marks alone make it a call.
        """
        return name in self._names or (is_unknown_allowed and _NAME.fullmatch(name) is not None)


def json_value(text: str) -> Any:
    """Return a JSON value; None if the text is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_arguments(text: str) -> str | None:
    """Return the normalised JSON text of an object, which is empty for null; None if the text is neither."""
    return "{}" if text.strip() == "null" else arguments_text(json_value(text))


def call_of(
    value: Any, keys: Sequence[str] = ("arguments",), *, defaults_to_none: bool = True
) -> ParsedCall | None:
    """Return the call that an object describes; None if it does not.

    Args:
        keys: names of the arguments, besides `name`.
        defaults_to_none: whether an object without arguments is a call without any, as one with null for them is.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name or not is_text(name):
        return None
    has_none = defaults_to_none or any(key in value for key in keys)
    given: Any = next((value[key] for key in keys if value.get(key) is not None), {} if has_none else None)
    # Some models quote the object.
    arguments = json_arguments(given) if isinstance(given, str) else arguments_text(given)
    return None if arguments is None else ParsedCall(name, arguments)


def calls_of(values: Any, keys: Sequence[str]) -> list[ParsedCall] | None:
    """Return the calls that a list of objects describes; None if one does not, or there is none."""
    if not isinstance(values, list) or not values:
        return None
    calls = [call_of(value, keys) for value in values]
    return None if None in calls else [call for call in calls if call is not None]
