"""Decoding of OpenAI requests: errors name the field, and unsupported fields are refused."""

from __future__ import annotations

import json
import re

import pytest

from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest, decode_request, unsupported
from case_tables import wrong_answers

BAD_BODIES: list[tuple[str, str | None, str]] = [
        ("{", None, "not valid JSON"),
        ('{"model":"tiny",}', None, "request body is not valid JSON: trailing comma in object"),
        ("[" * 100_000, None, "nested too deeply"),
        ("[1]", None, "Expected `object`"),
        ('{"messages":[{"role":"user"}],"documents":[{"a":' + "[" * 100_000, "documents", "nested too deeply"),
        ('{"messages":[]}', "messages", "length >= 1"),
        ('{"messages":[{"role":1}]}', "messages[0].role", "Expected `str`"),
        ('{"messages":[{"role":"user"}],"n":1.5}', "n", "Expected `int"),
        ('{"messages":[{"role":"user"}],"n":"1.5"}', "n", "Expected `int"),
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
]  # fmt: skip


def refused(body: str) -> BadRequest:
    try:
        decode_request("chat/completions", body.encode())
    except BadRequest as error:
        return error
    return BadRequest("accepted", param="accepted")


def test_bad_bodies_name_the_field() -> None:
    told = [(body, param, message, refused(body)) for body, param, message in BAD_BODIES]
    assert wrong_answers((body, param, error.param) for body, param, _, error in told) == {}
    assert [
        (body[:100], each.message) for body, _, said, each in told if not re.search(said, each.message)
    ] == []
    shapes = [set(json.loads(error.body())["error"]) for *_, error in told]
    assert [shape for shape in shapes if shape != {"message", "type", "param", "code"}] == []


IGNORED_OR_NOT: list[tuple[dict[str, object], str | None]] = [
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
]


def test_fields_that_would_change_an_answer_are_not_ignored() -> None:
    hello = {"messages": [{"role": "user", "content": "x"}], "unknown_field": 1}
    told = [
        (
            fields,
            expected,
            unsupported(decode_request("chat/completions", json.dumps({**hello, **fields}).encode())),
        )
        for fields, expected in IGNORED_OR_NOT
    ]
    assert wrong_answers(told) == {}


MESSAGES: list[tuple[dict[str, object], str]] = [
    ({"max_tokens": -3}, "max_tokens: Expected `int` >= 1; it is -3 (greater_than_equal)"),
    ({"n": "one"}, 'n: Expected `int | null`, got `str`; it is "one"'),
    ({"n": "200"}, 'n: Expected `int` <= 128; it is "200" (less_than_equal)'),
    ({"stream": "yes"}, 'stream: Expected `bool | null`, got `str`; it is "yes"'),
    ({"stream": 2}, "stream: Expected `bool | null`, got `int`; it is 2"),
    ({"n": True}, "n: Expected `int | null`, got `bool`; it is true"),
    (
        {"n": "1", "kv_transfer_params": "null"},
        "kv_transfer_params is internal to engines and refused from clients",
    ),
    ({"logit_bias": {"5": 1, "bad1": 1}}, 'logit_bias: Expected `int`, got `str`; it is {"bad1": 1}'),
    (
        {"logit_bias": {"x": 1, "5": 1, "y": 2}},
        'logit_bias: Expected `int`, got `str`; it is {"x": 1, "y": 2}',
    ),
    (
        {"logit_bias": {"5": 1, "7": 400}},
        'logit_bias: Expected `float` <= 100.0; it is {"7": 400} (less_than_equal)',
    ),
    ({"stop": ["a", 5]}, "stop[1]: Expected `str`, got `int`; it is 5"),
    ({"user": 5 * [1]}, "user: Expected `str | null`, got `array`"),
    ({"tool_choice": "x" * 100, "tools": 5}, "tools: Expected `array | null`, got `int`; it is 5"),
    ({"seed": "x" * 100}, f'seed: Expected `int | null`, got `str`; it is "{"x" * 63}...'),
    ({"top_p": 0, "user": "x" * 100_000}, "top_p: Expected `float` > 0.0 (greater_than)"),
    ({"messages": [{"role": 5}]}, "messages[0].role: Expected `str`, got `int`"),
    (
        {"reasoning_effort": "Low"},
        "reasoning_effort: Invalid enum value 'Low'; give one of high, low, max, medium, minimal, none, xhigh",
    ),
    ({"messages": None}, "messages: Expected `array`, got `null`"),
]


def test_messages_name_the_field_and_the_value() -> None:
    hello = {"messages": [{"role": "user", "content": "x"}]}
    told = [
        (fields, message, refused(json.dumps({**hello, **fields})).message) for fields, message in MESSAGES
    ]
    assert wrong_answers(told) == {}


def test_numbers_and_booleans_may_be_texts() -> None:
    body = {
        "messages": [{"role": "user", "content": "7"}],
        "logprobs": "true",
        "stream": "False",
        "ignore_eos": 1,
        "seed": "7",
        "temperature": "0.5",
        "stop": ["1", "true"],
        "logit_bias": {"5": "-1.5"},
        "vllm_xargs": {"a": "1"},
    }
    request = decode_request("chat/completions", json.dumps(body).encode())
    assert isinstance(request, ChatCompletionRequest)
    assert (request.logprobs, request.stream, request.ignore_eos) == (True, False, True)
    assert (request.seed, request.temperature) == (7, 0.5)
    assert (request.stop, request.logit_bias, request.vllm_xargs) == (["1", "true"], {5: -1.5}, {"a": "1"})
    assert request.messages[0].content == "7"


def test_whole_numbers_may_have_a_fraction_of_zero() -> None:
    """As R, Lua and JavaScript's serialisers of other numbers write them."""
    body = b"""{"prompt": [1.0, 2], "max_tokens": 2.0, "seed": 1e3, "top_k": 5.0, "stop_token_ids": [3.0],
        "vllm_xargs": {"a": 1.0, "b": "1.0"}}"""
    request = decode_request("completions", body)
    assert isinstance(request, CompletionRequest)
    assert (request.max_tokens, request.seed, request.top_k) == (2, 1000, 5)
    assert (request.prompt, request.stop_token_ids) == ([1, 2], [3])
    assert request.vllm_xargs == {"a": 1.0, "b": "1.0"}
    with pytest.raises(BadRequest, match=r"max_tokens: Expected `int.*, got `float`; it is 2\.5"):
        decode_request("completions", b'{"prompt": "x", "max_tokens": 2.5}')


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"seed": (1 << 63)}, "less_than_equal"),
        ({"seed": -(1 << 63) - 1}, "greater_than_equal"),
        ({"top_p": 0}, "greater_than"),
        ({"n": "200"}, "less_than_equal"),
        ({"n": "x"}, None),
        ({"stop": 5 * ["a"]}, None),
    ],
)
def test_a_number_out_of_bounds_has_a_code(fields: dict[str, object], code: str | None) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields})
    with pytest.raises(BadRequest) as caught:
        decode_request("chat/completions", body.encode())
    assert caught.value.code == code
    assert code is None or caught.value.message.endswith(f" ({code})")


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": None}, {"prompt": []}, {"prompt": None, "prompt_embeds": []}]
)
def test_a_completion_without_prompt_says_what_is_missing(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"^Either prompt or prompt_embeds must be provided") as caught:
        decode_request("completions", json.dumps(fields).encode())
    assert caught.value.param == "prompt"
