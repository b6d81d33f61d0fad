"""A tool parser for a model that writes its calls as `<call NAME>{"KEY": VALUE}</call>`.

argosy serve builtin://tiny --tool-parser-plugin examples/tool_parser.py --tool-call-parser call_tag
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.parser_registry import register_tool_parser
from argosy_engine.parsers.scanners import MarkerScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, json_arguments
from argosy_engine.structured.structural_tag import ToolCallForm

START, END = "<call ", "</call>"


@register_tool_parser("call_tag")
class CallTagToolParser(ToolParser):
    starts = (START,)
    other_markers = (END,)
    call_form = ToolCallForm(begin=f"{START}{{name}}>", end=END)
    """What the grammar of `tool_choice: required` lets the model write."""

    def scanner(self, start: str) -> Scanner:
        return MarkerScanner(END)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        name, _, rest = text.removeprefix(START).removesuffix(END).partition(">")
        arguments = json_arguments(rest)
        if not name or arguments is None:
            return None  # the text becomes content
        return (ParsedCall(name, arguments),)
