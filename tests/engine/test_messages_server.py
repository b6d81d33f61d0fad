"""/v1/messages as Anthropic's SDK meets it: a real engine, whole and streamed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam, ToolParam

from argosy_engine.checkpoint.model_folder import resolve_model
from message_events import message, parsed
from processes import Server, free_port, running, wait_until
from served_engine import KEY, MAX_MODEL_LEN, SERVE_TINY

pytestmark = pytest.mark.timeout(300)

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello! What can you do?"}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Get the weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(tiny_server: Server) -> Iterator[anthropic.Anthropic]:
    """Without a temperature, for which the SDK has no argument, the model is greedy."""
    with anthropic.Anthropic(base_url=tiny_server.url, api_key=KEY, max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def http(tiny_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, headers={"x-api-key": KEY}, timeout=60) as plain:
        yield plain


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 64, "temperature": 0, "messages": HELLO, **fields}


def test_a_whole_message(client: anthropic.Anthropic) -> None:
    response = client.messages.with_raw_response.create(
        model="tiny", max_tokens=64, messages=HELLO, system="Be kind."
    )
    answer = response.parse()
    assert [block.type for block in answer.content][-1] == "text"
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0
    assert response.request_id
    assert answer.id == f"msg_{response.request_id}"


def test_a_streamed_message_is_the_whole_one(client: anthropic.Anthropic, http: httpx.Client) -> None:
    whole = client.messages.create(model="tiny", max_tokens=64, messages=HELLO)
    with client.messages.stream(model="tiny", max_tokens=64, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    said = [(block.type, getattr(block, block.type)) for block in whole.content]
    assert [(block.type, getattr(block, block.type)) for block in final.content] == said
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert text == final.content[-1].text  # type: ignore[union-attr]
    streamed = http.post("/v1/messages", json=body(stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["request-id"] == streamed.headers["x-request-id"]
    assert message(parsed(streamed.content))["content"] == json.loads(
        json.dumps([block.to_dict() for block in whole.content])
    )


@pytest.mark.parametrize(
    "choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}]
)
def test_a_tool_and_its_result(client: anthropic.Anthropic, choice: Any) -> None:
    question: MessageParam = {"role": "user", "content": "What is the weather in Paris?"}
    with client.messages.stream(
        model="tiny", max_tokens=200, messages=[question], tools=[WEATHER], tool_choice=choice
    ) as stream:
        calling = stream.get_final_message()
    call = calling.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert calling.stop_reason == "tool_use"
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}],
    }
    answer = client.messages.create(
        model="tiny",
        max_tokens=100,
        messages=[question, {"role": "assistant", "content": calling.content}, result],
        tools=[WEATHER],
    )
    assert answer.usage.cache_read_input_tokens
    assert answer.content


def test_thinking_is_turned_off(client: anthropic.Anthropic) -> None:
    kinds = [
        [
            block.type
            for block in client.messages.create(
                model="tiny", max_tokens=64, messages=HELLO, thinking=thinking
            ).content
        ]
        for thinking in (
            anthropic.types.ThinkingConfigAdaptiveParam(type="adaptive"),
            anthropic.types.ThinkingConfigDisabledParam(type="disabled"),
        )
    ]
    assert kinds == [["thinking", "text"], ["text"]]


def test_a_final_assistant_message_is_continued(client: anthropic.Anthropic) -> None:
    off = anthropic.types.ThinkingConfigDisabledParam(type="disabled")
    whole = client.messages.create(model="tiny", max_tokens=64, messages=HELLO, thinking=off)
    text = whole.content[0].text  # type: ignore[union-attr]
    cut = text.index(" and")
    begun: list[MessageParam] = [*HELLO, {"role": "assistant", "content": text[:cut]}]
    rest = client.messages.create(model="tiny", max_tokens=64, messages=begun, thinking=off)
    assert rest.content[0].text == text[cut:]  # type: ignore[union-attr]


def test_a_special_token_in_a_stop_sequence_is_found(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model("builtin://tiny"), model, copy_function=shutil.copyfile)
    for name in (
        "config.json",
        "generation_config.json",
    ):  # the token that ends a text ends no output of this one
        fields = json.loads((model / name).read_bytes())
        (model / name).write_text(json.dumps({**fields, "eos_token_id": 0}))
    port, asked = free_port(), body(thinking={"type": "disabled"})
    command = [SERVE_TINY[0], str(model), *SERVE_TINY[2:], "--served-model-name", "tiny", "--port", str(port)]

    def answers(stop: str) -> list[dict[str, Any]]:
        fields = {**asked, "stop_sequences": ["never said", stop]}
        whole = plain.post("/v1/messages", json=fields)
        streamed = plain.post("/v1/messages", json={**fields, "stream": True})
        return [whole.json(), message(parsed(streamed.content))]

    with (
        running(command, tmp_path / "log", port=port) as server,
        httpx.Client(base_url=server.url, timeout=60) as plain,
    ):
        assert plain.post("/v1/messages", json=asked).json()["stop_reason"] == "max_tokens"
        said = answers("<|im_end|>")[0]["content"][-1]["text"]
        for stop, expected in (("<|im_end|>", said), (f"{said[-2:]}<|im_end|>", said[:-2])):
            for answer in answers(stop):
                assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
                assert answer["content"][-1]["text"] == expected


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    off = anthropic.types.ThinkingConfigDisabledParam(type="disabled")
    whole = client.messages.create(model="tiny", max_tokens=64, messages=HELLO, thinking=off)
    text = whole.content[0].text  # type: ignore[union-attr]
    stop = text.split()[2]
    for stream in (False, True):
        arguments: dict[str, Any] = {
            "thinking": off,
            "stop_sequences": ["never said", stop],
        }
        if stream:
            with client.messages.stream(model="tiny", max_tokens=64, messages=HELLO, **arguments) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(model="tiny", max_tokens=64, messages=HELLO, **arguments)
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert answer.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


def test_max_tokens_are_bounded_by_the_context(client: anthropic.Anthropic) -> None:
    short = client.messages.create(model="tiny", max_tokens=2, messages=HELLO)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    long: list[MessageParam] = [{"role": "user", "content": "word " * 1950}]
    used = client.messages.count_tokens(model="tiny", messages=long).input_tokens
    assert 0.9 * MAX_MODEL_LEN < used < MAX_MODEL_LEN
    assert client.messages.create(model="tiny", max_tokens=2 * MAX_MODEL_LEN, messages=long).content


def test_structured_output(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}},
        "required": ["name"],
        "additionalProperties": False,
    }
    answer = client.messages.create(
        model="tiny",
        max_tokens=200,
        messages=[{"role": "user", "content": "My name is Tom."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert list(json.loads(answer.content[-1].text)) == ["name"]  # type: ignore[union-attr]


def test_counted_tokens_are_those_of_the_message(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HELLO, system="Be kind.", tools=[WEATHER])
    answer = client.messages.create(
        model="tiny", max_tokens=1, messages=HELLO, system="Be kind.", tools=[WEATHER]
    )
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached
    too_long: list[MessageParam] = [{"role": "user", "content": "word " * 2 * MAX_MODEL_LEN}]
    assert client.messages.count_tokens(model="tiny", messages=too_long).input_tokens > MAX_MODEL_LEN


REFUSED: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = [
    ({"model": "nope"}, anthropic.NotFoundError, "not_found_error"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
    (
        {"messages": [{"role": "user", "content": "word " * 4 * MAX_MODEL_LEN}]},
        anthropic.BadRequestError,
        "invalid_request_error",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "input": {}}]}]},
        anthropic.BadRequestError,
        "invalid_request_error",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "name"), REFUSED)
def test_refusals_are_the_exceptions_of_the_sdk(
    client: anthropic.Anthropic,
    fields: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    name: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as refusal:
        client.messages.create(
            **{"model": "tiny", "max_tokens": 4, "messages": HELLO, "stream": stream, **fields}
        )
    assert refusal.value.type == name
    assert refusal.value.request_id


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0]: "),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]: "),
        (
            {
                "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice.name: 'web_search' is a tool that this server does not run",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}},
            "output_config.format",
        ),
        ({"resume": {"token_ids": [1]}, "stream": True}, "resume "),
        ({"priority": 1}, "priority"),
        (
            {"tools": [{**WEATHER, "input_schema": {"type": 5}}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema must be a JSON schema of an object",
        ),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name must be"),
    ],
)
def test_errors_name_the_field(http: httpx.Client, fields: dict[str, Any], text: str) -> None:
    answer = http.post("/v1/messages", json=body(**fields))
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_requests_that_no_route_sees_are_refused_in_anthropics_shape(tiny_server: Server) -> None:
    key = {"x-api-key": KEY}
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (401, "authentication_error", {"json": body()}),
        (401, "authentication_error", {"json": body(), "headers": {"x-api-key": "wrong"}}),
        (401, "authentication_error", {"json": body(), "headers": {**key, "authorization": "Bearer wrong"}}),
        (400, "invalid_request_error", {"content": b"x", "headers": key}),
        (
            413,
            "request_too_large",
            {"content": b"x" * (33 << 20), "headers": {**key, "content-type": "application/json"}},
        ),
    ]
    with httpx.Client(base_url=tiny_server.url, timeout=60) as plain:
        for status, kind, request in cases:
            answer = plain.post("/v1/messages", **request)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
            assert answer.json()["type"] == "error"
        unknown = plain.post("/v1/messages/batches", json={}, headers=key)
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        bearer = plain.get("/v1/models", headers=key)
        assert bearer.status_code == 200


def test_a_client_that_leaves_ends_its_request(http: httpx.Client) -> None:
    forever = body(
        stream=True, max_tokens=1900, messages=[{"role": "user", "content": "Count"}], temperature=1
    )
    with http.stream("POST", "/v1/messages", json=forever) as stream:
        next(stream.iter_bytes())
    wait_until(lambda: http.get("/load").json() == {"server_load": 0}, "the end of the request")


AGENT_MESSAGES: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Hi"}, {"type": "image", "source": {"type": "url"}}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "server_tool_use", "id": "s", "name": "tool_search_tool_regex", "input": {"query": "x"}},
            {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"tool_references": []}},
            {"type": "tool_use", "id": "c", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "content": [
                    {"type": "tool_reference", "tool_name": "get_weather"},
                    {
                        "type": "document",
                        "source": {"type": "text", "data": "Sunny", "media_type": "text/plain"},
                    },
                    {"type": "search_result", "source": "u", "title": "t", "content": []},
                    {"type": "shiny", "text": {}},
                ],
            }
        ],
    },
]
SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "web_search_20250305", "name": "web_search"},
]


@pytest.mark.parametrize("mode", ["whole", "stream", "count"])
def test_what_agents_replay_is_answered_and_what_was_left_out_is_told(http: httpx.Client, mode: str) -> None:
    given = {
        "messages": AGENT_MESSAGES,
        "tools": [WEATHER, *SERVER_TOOLS],
        "tool_choice": {"type": "auto"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    path = "/v1/messages/count_tokens" if mode == "count" else "/v1/messages"
    answer = http.post(path, json=body(**given, max_tokens=4, stream=mode == "stream"))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-argosy-dropped-tools"] == "tool_search_tool_regex, web_search"
    shown = http.get("/metrics").text
    for kind in ("image", "server_tool_use", "tool_search_tool_result"):
        name = f'argosy_engine_skipped_content_total{{api="messages",kind="{kind}",model_name="tiny"}}'
        assert re.search(rf"^{re.escape(name)} [1-9]", shown, re.MULTILINE), kind


def test_a_schema_that_no_grammar_enforces_is_relaxed_unless_it_is_strict(http: httpx.Client) -> None:
    text = {"type": "string", "pattern": "^x+$", "maxLength": 3}
    bad = {"name": "bad", "input_schema": {"type": "object", "properties": {"a": text}}}
    good = {
        "name": "good",
        "input_schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
    }
    asked = body(tools=[bad, good], tool_choice={"type": "any"}, max_tokens=100)
    answer = http.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    assert any(block["type"] == "tool_use" for block in answer.json()["content"])
    name = 'argosy_engine_relaxed_tool_schemas_total{keyword="maxLength",model_name="tiny"} 1.0'
    assert name in http.get("/metrics").text
    refused = http.post("/v1/messages", json={**asked, "tools": [{**bad, "strict": True}, good]})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "maxLength" in message
    assert "$.properties.a" in message
