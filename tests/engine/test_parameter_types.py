"""Values of arguments that a model writes as plain text."""

from __future__ import annotations

from typing import Any

import pytest

from argosy_engine.parsers.chat_parser import ChatParser
from argosy_engine.parsers.parser_registry import TOOL_PARSERS


class CountingSchema(dict[str, Any]):
    """A schema that counts how often its values are listed."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += key == "enum"
        return super().get(key, default)


@pytest.mark.parametrize(
    ("family", "argument"),
    [
        ("qwen3_coder", "<parameter=a>1</parameter>"),
        ("glm45", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ],
)
def test_a_schema_is_read_once_however_many_arguments_there_are(family: str, argument: str) -> None:
    schema = CountingSchema(enum=[1, "b"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    parser = ChatParser(tool_parser=TOOL_PARSERS[family](tools))
    begin, end = ("<function=f>", "</function>") if family == "qwen3_coder" else ("f", "")
    text = f"<tool_call>{begin}{argument * 50}{end}</tool_call>"
    calls = parser.feed(text * 3, is_last=True).calls
    assert [call.arguments for call in calls] == ['{"a": 1}'] * 3
    assert schema.reads == 1
