"""Tools of Responses requests as functions of a chat: names, descriptions, choices, what calls stand for."""

from __future__ import annotations

import json
import time
import timeit
from typing import Any

import pytest

from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import ChatCompletionRequest
from argosy_protocol.responses import decode_responses_request
from argosy_protocol.responses_chat import (
    ClientTool,
    ResponseTools,
    name_responses_field,
    translated_response,
)

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name, **fields}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": list(tools)}


def added(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


def translated(
    *tools: dict[str, Any], items: list[Any] | None = None, **fields: Any
) -> tuple[ChatCompletionRequest, ResponseTools]:
    body = {"model": "m", "input": [*(items or []), HI], "tools": list(tools), **fields}
    return translated_response(decode_responses_request(json.dumps(body).encode()))[:2]


def names(chat: ChatCompletionRequest) -> list[str]:
    return [tool["function"]["name"] for tool in chat.tools or ()]


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    chat, tools = translated(custom("exec", description="Runs.", format=GRAMMAR))
    assert chat.tools == [
        {
            "type": "function",
            "function": {
                "name": "exec",
                "description": 'Runs.\n\n`input` has the form of this grammar (lark):\nstart: "a"',
                "parameters": {
                    "type": "object",
                    "properties": {"input": {"type": "string"}},
                    "required": ["input"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    assert tools.called("exec") == ClientTool("custom", "exec")


def test_tools_of_namespaces_are_named_by_both() -> None:
    chat, tools = translated(
        function("f", strict=True, parameters=SCHEMA),
        namespace("git", function("log", parameters=SCHEMA), custom("apply")),
        namespace("mcp__web__", function("get")),
        namespace("functions", custom("exec")),
    )
    assert names(chat) == ["f", "git__log", "git__apply", "mcp__web__get", "exec"]
    assert [tools.called(name) for name in names(chat)] == [
        ClientTool("function", "f"),
        ClientTool("function", "log", "git"),
        ClientTool("custom", "apply", "git"),
        ClientTool("function", "get", "mcp__web__"),
        ClientTool("custom", "exec", "functions"),
    ]
    assert (chat.tools or [])[0]["function"] == {"name": "f", "parameters": SCHEMA, "strict": True}
    assert tools.called("invented") == ClientTool("function", "invented")


def test_names_that_collide_are_told_apart() -> None:
    chat, tools = translated(
        namespace("a", function("b__c"), custom("x")),
        namespace("a__b", function("c")),
        function("a__b__c"),
        custom("a__x"),
        items=[added(function("a__x"))],
    )
    assert names(chat) == ["a__b__c_2", "a__x", "a__b__c_3", "a__b__c", "a__x_2", "a__x_3"]
    assert tools.called("a__b__c") == ClientTool("function", "a__b__c")
    assert tools.called("a__b__c_2") == ClientTool("function", "b__c", "a")
    assert tools.called("a__x_2") == ClientTool("custom", "a__x")
    assert len({tools.called(name) for name in names(chat)}) == len(names(chat))


def test_names_that_functions_may_not_have_are_replaced() -> None:
    long, longer = "n" * 80, "n" * 81
    chat, _ = translated(
        namespace("my server", function("caf\u00e9")), namespace("s", function(long), function(longer))
    )
    assert names(chat)[0] == "my_server__caf_"
    assert [len(name) for name in names(chat)[1:]] == [64, 64]
    assert len(set(names(chat))) == 3
    assert names(translated(namespace("s", function(long)))[0]) == names(chat)[1:2]


def test_the_conversation_adds_tools_and_calls_of_all_are_named_as_they_are() -> None:
    items = [
        added(namespace("functions", custom("exec")), {"type": "web_search"}, {"type": 5}, "no tool"),
        {"type": "custom_tool_call", "call_id": "1", "name": "exec", "namespace": "functions", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "r"},
        {
            "type": "tool_search_output",
            "call_id": "2",
            "execution": "client",
            "tools": [namespace("git", function("log"))],
        },
        {"type": "function_call", "call_id": "3", "name": "log", "namespace": "git", "arguments": "{}"},
        {"type": "function_call", "call_id": "4", "name": "gone", "namespace": "old", "arguments": "{}"},
    ]
    chat, _ = translated(function("exec"), items=items)
    assert names(chat) == ["exec", "exec_2", "git__log"]
    calls = [call["function"]["name"] for message in chat.messages for call in message.tool_calls or ()]
    assert calls == ["exec_2", "git__log", "old__gone"]


def test_a_tool_that_comes_again_is_described_as_the_last_time() -> None:
    chat, _ = translated(
        items=[
            added(function("f", description="a"), function("g")),
            HI,
            added(function("f", description="b")),
        ]
    )
    assert [tool["function"] for tool in chat.tools or ()] == [
        {"name": "f", "description": "b"},
        {"name": "g"},
    ]


def test_tools_of_items_are_bounded_without_a_refusal() -> None:
    many = [function(f"f{number}") for number in range(400)]
    chat, _ = translated(*many, items=[added(*[function(f"g{number}") for number in range(600)])])
    assert len(names(chat)) == 512
    with pytest.raises(BadRequest, match="512"):
        translated(namespace("a", *many), namespace("b", *many))


def test_a_search_for_tools_by_the_client_is_a_function() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "d", "parameters": SCHEMA}
    chat, tools = translated(search, {"type": "tool_search"})
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "tool_search", "description": "d", "parameters": SCHEMA},
        }
    ]
    assert tools.called("tool_search").kind == "tool_search"


CHOICES: list[tuple[Any, Any]] = [
    ({"type": "function", "name": "f"}, "f"),
    ({"type": "custom", "name": "exec"}, "exec"),
    ({"type": "function", "name": "log"}, "git__log"),
    ({"type": "function", "name": "log", "namespace": "git"}, "git__log"),
    ({"type": "function", "name": "f", "namespace": "git"}, "git__f"),
    ({"type": "function", "name": "git__log"}, None),
    ({"type": "function", "name": "exec"}, None),
    ({"type": "custom", "name": "f"}, None),
    ({"type": "custom"}, None),
    ({"type": "web_search"}, None),
    ({"type": "mcp", "server_label": "s"}, None),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_a_choice_names_a_tool_as_the_client_does(choice: dict[str, Any], expected: str | None) -> None:
    tools = [
        function("f"),
        custom("exec"),
        namespace("git", function("log"), function("f")),
        {"type": "web_search"},
    ]
    if expected is None:
        with pytest.raises(BadRequest) as refused:
            translated(*tools, tool_choice=choice)
        assert (refused.value.param or "").startswith("tool_choice.")
        return
    chat, _ = translated(*tools, tool_choice=choice)
    assert chat.tool_choice == {"type": "function", "function": {"name": expected}}


def test_allowed_tools_may_be_of_any_kind() -> None:
    allowed = [
        {"type": "custom", "name": "exec"},
        {"type": "function", "name": "log"},
        {"type": "web_search"},
    ]
    chat, _ = translated(
        function("f"),
        custom("exec"),
        namespace("git", function("log")),
        {"type": "web_search"},
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed},
    )
    assert (names(chat), chat.tool_choice) == (["exec", "git__log"], "auto")


def test_many_allowed_tools_are_found_at_once() -> None:
    tools = [custom(f"c{number}") for number in range(512)]
    allowed = [{"type": "custom", "name": "c511"}] * 100_000
    started = time.process_time()
    chat, _ = translated(*tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert names(chat) == ["c511"]
    assert time.process_time() - started < 2


def test_without_a_tool_of_the_client_there_is_none() -> None:
    chat, _ = translated({"type": "web_search"}, tool_choice="auto")
    assert (chat.tools, chat.tool_choice) == (None, None)


def test_errors_about_functions_name_the_tools_they_stand_for() -> None:
    _, tools = translated(
        {"type": "web_search"},
        namespace("git", function("log")),
        function("f"),
        items=[added(function("g"))],
    )
    told = [
        name_responses_field(BadRequest("no", param=f"tools[{index}].function.name"), tools=tools).param
        for index in range(3)
    ]
    assert told == ["tools[1].tools[0].name", "tools[2].name", "input.name"]


def test_the_time_for_names_that_are_alike_grows_with_their_number() -> None:
    """All numbers were tried for each: 20 KB with five hundred such names took 20 ms. CPU times are compared."""

    def cpu_s(number: int) -> float:
        tools = [custom(f"{chr(300 + each)}") for each in range(number)]
        body = json.dumps({"model": "m", "input": [HI], "tools": tools}).encode()
        asked = decode_responses_request(body)
        return min(
            timeit.repeat(lambda: translated_response(asked), timer=time.process_time, number=1, repeat=5)
        )

    assert cpu_s(512) < 24 * max(cpu_s(64), 0.0001)
    chat, _ = translated(*(custom(f"{chr(300 + each)}") for each in range(3)), custom("__2"), custom("é"))
    assert names(chat) == ["_", "__2", "__3", "__2_2", "__4"]
