"""gpt-oss: calls are messages to `functions.NAME` in OpenAI's Harmony format, which `HarmonyParser` reads.

This class holds what else depends on the form: its special tokens and the grammar of required calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import MarkerScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, is_text, json_arguments
from argosy_engine.structured.structural_tag import ToolCallForm

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_FUNCTIONS = "functions."


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

    def function(self, to: str) -> str | None:
        """Return the function to which a recipient refers; None if it is no function of the request."""
        name = to.removeprefix(_FUNCTIONS)
        is_known = to.startswith(_FUNCTIONS) or name in self._names
        return name if name and is_known and is_text(name) else None


def recipient(header: str) -> str:
    """Return a message's recipient; empty if it has none."""
    _, mark, rest = header.partition("to=")
    return rest.split("<|", 1)[0].split(maxsplit=1)[0] if mark and rest.strip() else ""
