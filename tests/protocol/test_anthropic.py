"""Wire types of the Messages API: bounds, nulls, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_protocol.anthropic import (
    MessagesRequest,
    decode_count_tokens_request,
    decode_messages_request,
    error_body,
    error_event,
    is_messages_path,
)
from argosy_protocol.errors import (
    ApiError,
    BadGateway,
    BadRequest,
    ContextLengthExceeded,
    Forbidden,
    GatewayTimeout,
    HeadersTooLarge,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    ResourceUnavailable,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from case_tables import wrong_answers

HI = {"role": "user", "content": "hi"}


def decoded(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 5, "messages": [HI], **fields}
    return decode_messages_request(json.dumps(body).encode())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [HI] * 4097}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
        "messages[0].content",
    ),
    ({"system": 5}, "system"),
    ({"stream": "yes"}, "stream"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0]"),
    ({"tools": [{"name": "f"}] * 513}, "tools"),
    ({"tools": [{"name": "f" * 257}]}, "tools[0].name"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"data_parallel_rank": 0}, "data_parallel_rank"),
]


def refused_field(fields: dict[str, Any]) -> str | None:
    try:
        decoded(**fields)
    except BadRequest as error:
        return error.param
    return "accepted"


def test_a_field_that_is_wrong_is_named() -> None:
    assert wrong_answers((fields, param, refused_field(fields)) for fields, param in REFUSED) == {}


def test_fields_that_clients_send_without_a_value_take_their_default() -> None:
    names = (
        "system",
        "stream",
        "stop_sequences",
        "temperature",
        "tools",
        "tool_choice",
        "thinking",
        "metadata",
    )
    assert decoded(**dict.fromkeys(names)) == decoded()


def test_what_only_anthropics_servers_read_is_ignored() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    marked = {"role": "user", "content": [{"type": "text", "text": "hi", "citations": None, **mark}]}
    plain = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert decoded(messages=[marked], service_tier="auto", speed="fast", **mark) == decoded(messages=[plain])


def test_counting_tokens_needs_no_max_tokens() -> None:
    body = json.dumps({"model": "m", "messages": [HI]}).encode()
    assert decode_count_tokens_request(body).messages[0].content == "hi"
    with pytest.raises(BadRequest, match="max_tokens"):
        decode_messages_request(body)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("m"), "invalid_request_error"),
        (Unauthorized("m", code=""), "authentication_error"),
        (Forbidden("m"), "permission_error"),
        (NotFound("m"), "not_found_error"),
        (MethodNotAllowed("m", ["GET"]), "invalid_request_error"),
        (RequestTimeout("m"), "timeout_error"),
        (PayloadTooLarge("m"), "request_too_large"),
        (HeadersTooLarge("m"), "invalid_request_error"),
        (TooManyRequests("m"), "rate_limit_error"),
        (InternalError("m"), "api_error"),
        (BadGateway("m"), "api_error"),
        (Unavailable("m"), "overloaded_error"),
        (GatewayTimeout("m"), "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(error: ApiError, kind: str) -> None:
    body = json.loads(error_body(error))
    body["error"].pop("details", None)
    assert body == {"type": "error", "error": {"type": kind, "message": "m"}}


@pytest.mark.parametrize(
    ("error", "code"),
    [(ContextLengthExceeded("m"), "context_length_exceeded"), (ResourceUnavailable("m"), "resource_busy")],
)
def test_the_code_of_an_error_is_among_its_details(error: ApiError, code: str) -> None:
    assert json.loads(error_body(error))["error"]["details"] == {"error_code": code}


def test_an_error_in_a_stream_is_an_event_of_its_own() -> None:
    kind, data = error_event(BadGateway("m")).removesuffix(b"\n\n").split(b"\n")
    assert kind == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["type"] == "error"


def test_only_messages_paths_have_anthropics_errors() -> None:
    paths = ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"]
    assert all(map(is_messages_path, paths))
    assert not any(map(is_messages_path, ["/v1/messagesx", "/v1/chat/completions", "/", ""]))
