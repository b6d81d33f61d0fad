"""Deeply nested and odd JSON is refused as the client's fault on every endpoint."""

from __future__ import annotations

import itertools
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
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
KINDS = ("list", "object")

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


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {**AUTHORIZED, "content-type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def ask(client: httpx.Client, path: str, body: str) -> httpx.Response:
    return client.post(path, content=body.encode())


@pytest.mark.parametrize("path", PATHS)
def test_deep_json_in_a_body_is_refused_and_the_field_named(client: httpx.Client, path: str) -> None:
    streams = (False, True) if path.endswith("completions") else (False,)
    fields = [(field, body) for at, field, body in FIELDS if at == path]
    assert fields
    otherwise = {}
    for (field, body), levels, kind, stream in itertools.product(fields, LEVELS, KINDS, streams):
        text = json.dumps({**body, "max_tokens": 1, "stream": stream}).replace(SLOT, nested(levels, kind))
        answer = ask(client, path, text)
        error = answer.json().get("error", {})
        if (answer.status_code, error.get("param")) != (400, field) or "nested" not in error["message"]:
            otherwise[json.dumps(body), levels, kind, stream] = answer.text[:500]
    assert otherwise == {}


@pytest.mark.parametrize("path", PATHS)
def test_the_deepest_body_allowed_never_fails_the_engine(client: httpx.Client, path: str) -> None:
    """It may have the wrong type, but no code behind the bound runs out of stack."""
    bodies = [body for at, _, body in FIELDS if at == path]
    assert bodies
    otherwise = {}
    for body, kind in itertools.product(bodies, KINDS):
        empty = json.dumps({**body, "max_tokens": 1})
        outer = depth_at_slot(empty)
        answer = ask(client, path, empty.replace(SLOT, nested(MAX_DEPTH - outer, kind)))
        if answer.status_code not in (200, 400) or "nested too deeply" in answer.text:
            otherwise[json.dumps(body), kind] = answer.text[:500]
    assert otherwise == {}


def depth_at_slot(text: str) -> int:
    before = text[: text.index(SLOT)]
    return sum(before.count(mark) for mark in "[{") - sum(before.count(mark) for mark in "]}")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tool_call_arguments_in_text_are_what_a_model_wrote(client: httpx.Client, path: str) -> None:
    """Those that are not JSON within the bounds reach the template as text."""
    texts = [
        "[" * 900 + "]" * 900,
        '{"a":' * 900 + "1" + "}" * 900,
        "[1,",
        nested(MAX_DEPTH, "list"),
        '{"a": "' + "[" * 200 + '"}',
    ]
    answers = {text: ask(client, path, json.dumps({**arguments(text), "max_tokens": 1})) for text in texts}
    assert {text: each.text[:500] for text, each in answers.items() if each.status_code != 200} == {}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tool_call_arguments_that_are_long_text_are_as_long_a_prompt(client: httpx.Client, path: str) -> None:
    answer = ask(client, path, json.dumps({**arguments("[" * 100_000), "max_tokens": 1}))
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tool_call_arguments_of_millions_of_values_are_more_than_a_chat_may_have(
    client: httpx.Client, path: str
) -> None:
    text = "[" + "[]," * 2_000_000 + "1]"
    answer = ask(client, path, json.dumps({**arguments(text), "max_tokens": 1}))
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("field", ["json", "structural_tag"])
def test_schemas_in_text_have_the_same_bounds(client: httpx.Client, field: str) -> None:
    otherwise = {}
    for levels in LEVELS:
        schema = '{"type": "array", "items": ' * levels + "{}" + "}" * levels
        answer = ask(
            client, "/v1/completions", json.dumps({"prompt": "a", "structured_outputs": {field: schema}})
        )
        param = answer.json().get("error", {}).get("param")
        if (answer.status_code, param) != (400, f"structured_outputs.{field}"):
            otherwise[levels] = answer.text[:500]
    assert otherwise == {}


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
def test_an_invalid_request_is_the_client_s_fault(client: httpx.Client, body: str) -> None:
    statuses = {path: ask(client, path, body).status_code for path in PATHS}
    assert {path: status for path, status in statuses.items() if not 400 <= status < 500} == {}
