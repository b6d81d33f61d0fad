"""Deeply nested and odd JSON is refused as the client's fault on every endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from argosy_protocol.json_limits import MAX_DEPTH
from processes import Server
from served_engine import AUTHORIZED

LEVELS = (MAX_DEPTH + 1, 900, 100_000)
USER = {"role": "user", "content": "Hi"}
SLOT = '"SLOT"'

FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        "tools",
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": "SLOT"}}],
        },
    ),
    ("/v1/chat/completions", "tools", {"messages": [USER], "tools": ["SLOT"]}),
    ("/v1/chat/completions", "documents", {"messages": [USER], "documents": [{"a": "SLOT"}]}),
    ("/v1/chat/completions", "documents", {"messages": [USER], "documents": ["SLOT"]}),
    ("/v1/chat/completions", "messages", {"messages": "SLOT"}),
    ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "SLOT"}]}),
    ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": [{"x": "SLOT"}]}]}),
    (
        "/v1/chat/completions",
        "messages",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "SLOT"}}]}]},
    ),
    (
        "/v1/chat/completions",
        "chat_template_kwargs",
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": "SLOT"}},
    ),
    ("/v1/chat/completions", "tool_choice", {"messages": [USER], "tool_choice": {"function": "SLOT"}}),
    ("/v1/chat/completions", "response_format", {"messages": [USER], "response_format": {"a": "SLOT"}}),
    (
        "/v1/chat/completions",
        "structured_outputs",
        {"messages": [USER], "structured_outputs": {"json": "SLOT"}},
    ),
    ("/v1/chat/completions", "unknown", {"messages": [USER], "unknown": "SLOT"}),
    ("/v1/completions", "prompt", {"prompt": "SLOT"}),
    ("/v1/completions", "structured_outputs", {"prompt": "a", "structured_outputs": {"json": "SLOT"}}),
    ("/v1/completions", "response_format", {"prompt": "a", "response_format": {"json_schema": "SLOT"}}),
    ("/v1/completions", "logit_bias", {"prompt": "a", "logit_bias": "SLOT"}),
    ("/v1/completions", "vllm_xargs", {"prompt": "a", "vllm_xargs": {"a": "SLOT"}}),
    ("/v1/embeddings", "input", {"input": "SLOT"}),
    ("/tokenize", "prompt", {"prompt": "SLOT"}),
    ("/tokenize", "messages", {"messages": [{"role": "user", "content": "SLOT"}]}),
    ("/tokenize", "tools", {"messages": [USER], "tools": [{"a": "SLOT"}]}),
    ("/detokenize", "tokens", {"tokens": "SLOT"}),
]


def arguments(text: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def nested(levels: int, kind: str) -> str:
    opening, closing = ("[", "]") if kind == "list" else ('{"a":', "}")
    return opening * levels + "1" + closing * levels


@pytest.fixture(scope="module")
def server(tiny_server: Server) -> Iterator[Server]:
    """The shared server, which logs no failure meanwhile."""
    before = len(tiny_server.log.read_text())
    yield tiny_server
    text = tiny_server.log.read_text()[before:]
    assert "Traceback" not in text
    assert "failed with" not in text


def ask(server: Server, path: str, body: str) -> httpx.Response:
    headers = {**AUTHORIZED, "content-type": "application/json"}
    return httpx.post(server.url + path, content=body.encode(), headers=headers, timeout=60)


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("path", "field", "body"), FIELDS)
def test_deep_json_in_a_body_is_refused_and_the_field_named(
    server: Server, path: str, field: str, body: dict[str, Any], levels: int, kind: str
) -> None:
    for stream in (False, True) if path.endswith("completions") else (False,):
        text = json.dumps({**body, "max_tokens": 1, "stream": stream}).replace(SLOT, nested(levels, kind))
        answer = ask(server, path, text)
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert "nested" in error["message"]
        assert error["param"] == field


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize(("path", "field", "body"), FIELDS)
def test_the_deepest_body_allowed_never_fails_the_engine(
    server: Server, path: str, field: str, body: dict[str, Any], kind: str
) -> None:
    """It may have the wrong type, but no code behind the bound runs out of stack."""
    empty = json.dumps({**body, "max_tokens": 1})
    outer = depth_at_slot(empty)
    answer = ask(server, path, empty.replace(SLOT, nested(MAX_DEPTH - outer, kind)))
    assert answer.status_code in (200, 400), answer.text
    assert "nested too deeply" not in answer.text


def depth_at_slot(text: str) -> int:
    before = text[: text.index(SLOT)]
    return sum(before.count(mark) for mark in "[{") - sum(before.count(mark) for mark in "]}")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 900 + "]" * 900,
        '{"a":' * 900 + "1" + "}" * 900,
        "[1,",
        nested(MAX_DEPTH, "list"),
        '{"a": "' + "[" * 200 + '"}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tool_call_arguments_in_text_are_what_a_model_wrote(server: Server, path: str, text: str) -> None:
    """Those that are not JSON within the bounds reach the template as text."""
    answer = ask(server, path, json.dumps({**arguments(text), "max_tokens": 1}))
    assert answer.status_code == 200, answer.text[:500]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tool_call_arguments_that_are_long_text_are_as_long_a_prompt(server: Server, path: str) -> None:
    answer = ask(server, path, json.dumps({**arguments("[" * 100_000), "max_tokens": 1}))
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tool_call_arguments_of_millions_of_values_are_more_than_a_chat_may_have(
    server: Server, path: str
) -> None:
    text = "[" + "[]," * 2_000_000 + "1]"
    answer = ask(server, path, json.dumps({**arguments(text), "max_tokens": 1}))
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("field", ["json", "structural_tag"])
def test_schemas_in_text_have_the_same_bounds(server: Server, field: str, levels: int) -> None:
    schema = '{"type": "array", "items": ' * levels + "{}" + "}" * levels
    body = {"prompt": "a", "structured_outputs": {field: schema}}
    answer = ask(server, "/v1/completions", json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"structured_outputs.{field}"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[",
        "{",
        "]" * 300,
        "[" * 300,
        '{"a":' * 300,
        '{"prompt": "' + "[" * 300,
        '{"prompt": "' + "\\",
        '{"prompt": ' + "[}" * 300,
        "\ufeff{}",
        '{"prompt": 1e999}',
        '{"prompt": NaN}',
        '{"prompt": "\\ud800"}',
        '{"prompt": ["\\ud800"], "logit_bias": {"x": 1}}',
        "null",
        "[]",
        '"text"',
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
def test_an_invalid_request_is_the_client_s_fault(server: Server, path: str, body: str) -> None:
    assert 400 <= ask(server, path, body).status_code < 500
