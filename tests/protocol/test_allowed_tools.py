"""`allowed_tools` as the tool choice of a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import ChatCompletionRequest, decode_request


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def decoded(tools: Any, allowed: Any) -> ChatCompletionRequest:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    request = decode_request("chat/completions", json.dumps(body).encode())
    assert isinstance(request, ChatCompletionRequest)
    return request


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_other_tools_are_left_out(mode: str) -> None:
    request = decoded([function("f"), function("g"), function("h")], {"mode": mode, "tools": named("h", "f")})
    assert (request.tool_choice, request.tools) == (mode, [function("f"), function("h")])


@pytest.mark.parametrize(
    ("tools", "allowed", "param"),
    [
        ([function("f")], None, "tool_choice.allowed_tools"),
        ([function("f")], {"tools": named("f")}, "tool_choice.allowed_tools.mode"),
        ([function("f")], {"mode": "none", "tools": named("f")}, "tool_choice.allowed_tools.mode"),
        ([function("f")], {"mode": "auto"}, "tool_choice.allowed_tools.tools"),
        ([function("f")], {"mode": "auto", "tools": []}, "tool_choice.allowed_tools.tools"),
        ([function("f")], {"mode": "auto", "tools": named("g")}, "tool_choice.allowed_tools.tools"),
        ([function("f")], {"mode": "auto", "tools": named("f", "g")}, "tool_choice.allowed_tools.tools"),
        ([function("f")], {"mode": "auto", "tools": ["f"]}, "tool_choice.allowed_tools.tools"),
        ([function("f")], {"mode": "auto", "tools": [{"function": 5}]}, "tool_choice.allowed_tools.tools"),
        ([{"function": {"name": []}}], {"mode": "auto", "tools": [{"function": {"name": []}}]},
         "tool_choice.allowed_tools.tools"),
        ([{}, {"function": 1}], {"mode": "auto", "tools": named("f")}, "tool_choice.allowed_tools.tools"),
        (None, {"mode": "auto", "tools": named("f")}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_choice_that_names_none_of_the_tools_is_refused(tools: Any, allowed: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decoded(tools, allowed)
    assert refused.value.param == param


def test_a_tool_whose_name_is_no_text_is_left_out() -> None:
    request = decoded([function("f"), {"function": {"name": []}}], {"mode": "auto", "tools": named("f")})
    assert request.tools == [function("f")]
