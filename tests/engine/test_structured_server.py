"""Structured outputs over HTTP, with the OpenAI SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from case_tables import wrong_answers
from processes import Server
from served_engine import AUTHORIZED, KEY

MESSAGES: list[Any] = [{"role": "user", "content": "Who are you?"}]
SHORT = {"type": "string", "maxLength": 6}
CALENDAR = {
    "type": "function",
    "function": {
        "name": "add_event",
        "parameters": {
            "type": "object",
            "properties": {"title": SHORT, "hour": {"type": "integer", "minimum": 0, "maximum": 23}},
            "required": ["title", "hour"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}


@pytest.fixture
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=KEY, max_retries=0) as sdk:
        yield sdk


def create(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"temperature": 1.0, "seed": 4, "max_tokens": 300, **fields}
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)


class Step(pydantic.BaseModel):
    kind: Literal["think", "act"]
    minutes: int = pydantic.Field(ge=0, le=99)


class Plan(pydantic.BaseModel):
    step: Step


def test_parse_gives_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Plan, temperature=0.0, max_tokens=900
    )
    plan = answer.choices[0].message.parsed
    assert isinstance(plan, Plan), answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_json_schema_streams_what_validates(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": SHORT},
        "required": ["name"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    whole = create(client, response_format=wanted).choices[0].message.content
    jsonschema.validate(json.loads(whole), schema)
    chunks = create(client, response_format=wanted, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_vllms_structured_outputs(client: openai.OpenAI) -> None:
    colours = ["red", "green", "blue"]
    answer = create(client, n=3, extra_body={"structured_outputs": {"choice": colours}})
    assert {choice.message.content for choice in answer.choices} <= set(colours)
    text = client.completions.create(
        model="tiny",
        prompt="Call",
        max_tokens=40,
        extra_body={"structured_outputs": {"regex": r"\d{3}-\d{4}"}},
    )
    assert re.fullmatch(r"\d{3}-\d{4}", text.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_calls_have_valid_arguments(client: openai.OpenAI, stream: bool) -> None:
    fields = {
        "tools": [CALENDAR, PING],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stream": stream,
    }
    if stream:
        chunks = create(client, **fields)
        calls = [
            call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()
        ]
        first, *later = (call.function for call in calls)
        name, text = first.name, "".join(function.arguments for function in (first, *later))
        assert [bool(call.id) for call in calls] == [True, *(False for _ in later)]
    else:
        answer = create(client, **fields).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        (call,) = answer.message.tool_calls
        name, text = call.function.name, call.function.arguments
    arguments = json.loads(text)
    tool = {"add_event": CALENDAR, "ping": PING}[name]
    jsonschema.validate(arguments, tool["function"].get("parameters", {"maxProperties": 0}))


JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["yes", "no"]}}}
NAMED = {"type": "function", "function": {"name": "ping"}}
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("auto", {"tools": [CALENDAR, PING]}),
    ("none", {"tools": [CALENDAR, PING], "tool_choice": "none"}),
    ("required", {"tools": [CALENDAR, PING], "tool_choice": "required"}),
    ("named", {"tools": [CALENDAR, PING], "tool_choice": NAMED}),
    ("format", {"response_format": JSON_FORMAT}),
    ("auto and format", {"tools": [CALENDAR, PING], "response_format": JSON_FORMAT}),
]


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
@pytest.mark.parametrize(("name", "fields"), TOGETHER, ids=[name for name, _ in TOGETHER])
def test_tools_reasoning_and_formats_together_streamed_and_not(
    client: openai.OpenAI, name: str, fields: dict[str, Any], thinks: bool
) -> None:
    fields = {
        **fields,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinks}},
        "temperature": 0.0,
    }
    (whole,) = create(client, **fields).choices
    reasoning = content = finish = ""
    calls: dict[int, list[str]] = {}
    for chunk in create(client, stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta
            reasoning += getattr(delta, "reasoning", None) or ""
            content += delta.content or ""
            finish = choice.finish_reason or finish
            for call in delta.tool_calls or ():
                told = calls.setdefault(call.index, ["", ""])
                told[0] += call.function.name or ""
                told[1] += call.function.arguments
    message = whole.message
    assert finish == whole.finish_reason
    assert content == (message.content or "")
    assert reasoning == (getattr(message, "reasoning", None) or "")
    made = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    assert list(calls.values()) == made
    if finish != "length":
        assert bool(made) is (name in ("required", "named")) or name == "auto"
        assert name != "named" or made == [["ping", "{}"]]
        if "response_format" in fields:
            assert json.loads(content) in ("yes", "no")


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "ping"}}
    answer = create(client, tools=[CALENDAR, PING], tool_choice=choice).choices[0]
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls] == [
        ("ping", "{}")
    ]


def test_only_allowed_tools_are_called_and_told_to_the_model(client: openai.OpenAI) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    answer = create(client, tools=[CALENDAR, PING], tool_choice=choice)
    (first, *_) = answer.choices[0].message.tool_calls
    assert first.function.name == "ping"
    alone = create(client, tools=[PING], tool_choice="required")
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


SET_OF_STRINGS = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
}
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
    ({"response_format": SET_OF_STRINGS}, "response_format.json_schema.schema",
     "response_format.json_schema.schema: the keyword uniqueItems"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "regexp"),
    ({"structured_outputs": {"regex": '".*"' * 1500}}, "structured_outputs.regex", "without an upper bound"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "str"),
    ({"structured_outputs": {"grammar": "root ::= nowhere"}}, "structured_outputs.grammar", "not defined"),
    ({"structured_outputs": {"regex": "a"}, "tools": [PING], "tool_choice": "required"}, "tool_choice", "combined"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [PING, {"type": "function"}]}, "tools[1]", "function.name"),
    ({"tools": [PING, {"type": "function", "function": {"name": 3}}]}, "tools[1].function.name", "function.name"),
    *(({"tools": [{"function": {"name": name}}]}, "tools[0].function.name", rule)
      for name, rule in (("", "1 to 64"), ("a" * 65, "1 to 64"), ("a{name}", "'a{name}'"), ("</tool_call>", "letters"),
                         ("a b", "letters"), ("a\n", "letters"), ("\u00e9", "letters"))),
    ({"tools": [{**PING, "type": "web"}]}, "tools[0].type", "'web'"),
    ({"tools": [{**PING, "type": "web"}], "tool_choice": "none"}, "tools[0].type", "'web'"),
    ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters", "object"),
    ({"tools": [{"function": {"name": "a", "description": 1}}]}, "tools[0].function.description", "text"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "response_format.json_schema.name", "text"),
    ({"tool_choice": "always", "tools": [PING]}, "tool_choice", "'required'"),
    ({"tool_choice": {**PING, "type": "x"}, "tools": [PING]}, "tool_choice", "'type': 'function'"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [PING]}, "tool_choice", "'x'"),
    ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
    ({"structural_tag": "{}"}, "structural_tag", "structured_outputs.structural_tag"),
]  # fmt: skip


def test_a_required_call_wins_over_the_response_format(tiny_server: Server) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 0, "tools": [PING],
            "tool_choice": "required", "response_format": {"type": "json_object"}}  # fmt: skip
    answer = httpx.post(f"{tiny_server.url}/v1/chat/completions", json=body, headers=AUTHORIZED, timeout=60)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"ping"}
    assert choice["finish_reason"] == "tool_calls"


def test_unsupported_constraints_are_a_400(tiny_server: Server) -> None:
    with httpx.Client(timeout=60, headers=AUTHORIZED) as http:
        answers = [
            http.post(
                f"{tiny_server.url}/v1/chat/completions",
                json={"model": "tiny", "messages": MESSAGES, "max_tokens": 5, **fields},
            )
            for fields, _, _ in REFUSED
        ]
    errors = [(answer.status_code, answer.json().get("error", {})) for answer in answers]
    assert (
        wrong_answers(
            (fields, (400, "invalid_request_error", param), (status, error.get("type"), error.get("param")))
            for (fields, param, _), (status, error) in zip(REFUSED, errors, strict=True)
        )
        == {}
    )
    assert [
        (says, error["message"])
        for (_, _, says), (_, error) in zip(REFUSED, errors, strict=True)
        if says not in error["message"]
    ] == []


def test_the_engine_still_serves_afterwards(client: openai.OpenAI) -> None:
    answer = create(client, extra_body={"structured_outputs": {"choice": ["still here"]}})
    assert answer.choices[0].message.content == "still here"
