"""Seed-OSS: calls as Qwen3-Coder writes them, between `<seed:tool_call>` and `</seed:tool_call>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from argosy_engine.parsers.tool_parsers.qwen3_coder_tool_parser import Qwen3CoderToolParser, QwenArguments
from argosy_engine.structured.structural_tag import ToolCallForm

_CALL, _END_CALL, _FUNCTION = "<seed:tool_call>", "</seed:tool_call>", "<function="


class SeedOssToolParser(Qwen3CoderToolParser):
    call_marks = (_CALL, _END_CALL)
    starts = (_CALL, _FUNCTION)
    other_markers = (_END_CALL,)
    call_form = ToolCallForm(
        begin=f"{_CALL}\n<function={{name}}>\n",
        end=f"\n</function>\n{_END_CALL}",
        style="qwen_xml",
        separator="\n",
    )

    def _arguments(self, convert: Callable[[str, str], Any]) -> QwenArguments:
        return _SeedArguments(convert)


class _SeedArguments(QwenArguments):
    closing = ((_END_CALL,),)
    starts = (_CALL, _FUNCTION)
