"""Decoding of OpenAI requests: errors name the field, and unsupported fields are refused."""

from __future__ import annotations

import json

import pytest

from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import decode_request, unsupported


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ("{", None, "not valid JSON"),
        ('{"model":"tiny",}', None, "request body is not valid JSON: trailing comma in object"),
        ("[" * 100_000, None, "nested too deeply"),
        ("[1]", None, "Expected `object`"),
        ('{"messages":[{"role":"user"}],"documents":[{"a":' + "[" * 100_000, "documents", "nested too deeply"),
        ('{"messages":[]}', "messages", "length >= 1"),
        ('{"messages":[{"role":1}]}', "messages[0].role", "Expected `str`"),
        ('{"messages":[{"role":"user"}],"n":1.5}', "n", "Expected `int"),
        ('{"messages":[{"role":"user"}],"n":"1"}', "n", "Expected `int"),
        ('{"messages":[{"role":"user"}],"n":1000000}', "n", "<= 128"),
        ('{"messages":[{"role":"user"}],"temperature":NaN}', None, "not valid JSON"),
        ('{"messages":[{"role":"user"}],"temperature":-1}', "temperature", ">= 0"),
        ('{"messages":[{"role":"user"}],"max_tokens":0}', "max_tokens", ">= 1"),
        ('{"messages":[{"role":"user"}],"seed":100000000000000000000}', "seed", "out of range|<=|Expected"),
        ('{"messages":[{"role":"user"}],"stop":["a"' + ',"b"' * 4 + "]}", "stop", "<= 4"),
        ('{"messages":[{"role":"user","content":null}]}', "messages[0].content", "required"),
        ('{"messages":[{"role":"user","content":"x"},{"role":"developer"}]}', "messages[1].content", "required"),
        ('{"messages":[{"role":"user","content":"x"}],"temperature":2.5}', "temperature", "<= 2"),
        ('{"messages":[{"role":"user","content":"x"}],"reasoning_effort":"nope"}', "reasoning_effort", "nope"),
        ('{"messages":[{"role":"user","content":"x"}],"stream_options":{}}', "stream_options", "stream"),
        ('{"messages":[{"role":"user","content":"x"}],"tools":[]}', "tools", "empty"),
        ('{"messages":[{"role":"user","content":"x"}],"tool_choice":"auto"}', "tool_choice", "needs tools"),
    ],
)  # fmt: skip
def test_bad_bodies_name_the_field(body: str, param: str | None, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        decode_request("chat/completions", body.encode())
    assert caught.value.param == param
    assert set(json.loads(caught.value.body())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"presence_penalty": 0.5}, None),
        ({"use_beam_search": False}, None),
        ({"use_beam_search": True, "length_penalty": 0.5}, None),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"response_format": {"type": "json_object"}}, None),
        ({"truncate_prompt_tokens": 3}, None),
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"thinking_token_budget": 64}, None),
        ({"thinking_token_budget": None, "include_reasoning": False}, None),
        ({"chat_template": "{{ 1 }}"}, None),
        ({"modalities": ["text"], "function_call": "auto"}, None),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"spaces_between_special_tokens": False}, None),
    ],
)
def test_fields_that_would_change_an_answer_are_not_ignored(
    fields: dict[str, object], expected: str | None
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "unknown_field": 1, **fields})
    assert unsupported(decode_request("chat/completions", body.encode())) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -3}, "max_tokens: Expected `int` >= 1; it is -3"),
        ({"n": "1"}, 'n: Expected `int | null`, got `str`; it is "1"'),
        ({"logit_bias": {"5": 1, "bad1": 1}}, 'logit_bias: Expected `int`, got `str`; it is {"bad1": 1}'),
        (
            {"logit_bias": {"x": 1, "5": 1, "y": 2}},
            'logit_bias: Expected `int`, got `str`; it is {"x": 1, "y": 2}',
        ),
        ({"logit_bias": {"5": 1, "7": 400}}, 'logit_bias: Expected `float` <= 100.0; it is {"7": 400}'),
        ({"stop": ["a", 5]}, "stop[1]: Expected `str`, got `int`; it is 5"),
        ({"user": 5 * [1]}, "user: Expected `str | null`, got `array`"),
        ({"tool_choice": "x" * 100, "tools": 5}, "tools: Expected `array | null`, got `int`; it is 5"),
        ({"seed": "x" * 100}, f'seed: Expected `int | null`, got `str`; it is "{"x" * 63}...'),
        ({"top_p": 0, "user": "x" * 100_000}, "top_p: Expected `float` > 0.0"),
        ({"messages": [{"role": 5}]}, "messages[0].role: Expected `str`, got `int`"),
        (
            {"reasoning_effort": "Low"},
            "reasoning_effort: Invalid enum value 'Low'; give one of high, low, max, medium, minimal, none, xhigh",
        ),
        ({"messages": None}, "messages: Expected `array`, got `null`"),
    ],
)
def test_messages_name_the_field_and_the_value(fields: dict[str, object], message: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields})
    with pytest.raises(BadRequest) as caught:
        decode_request("chat/completions", body.encode())
    assert caught.value.message == message
