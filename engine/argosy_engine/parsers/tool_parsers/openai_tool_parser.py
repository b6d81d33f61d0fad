"""gpt-oss: calls are messages to `functions.NAME` in OpenAI's Harmony format, which `HarmonyParser` reads.

This class holds what else depends on the form: its special tokens and the grammar of required calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from argosy_engine.parsers.argument_readers import (
    OBJECT_START,
    ArgumentReader,
    CallOpening,
    JsonArguments,
)
from argosy_engine.parsers.arguments_text import is_text
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import MarkerScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, json_arguments
from argosy_engine.structured.structural_tag import ToolCallForm

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_FUNCTIONS = "functions."
_BODY = re.compile(rf"\s{{0,16}}{OBJECT_START}")


class OpenAIToolParser(ToolParser):
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
