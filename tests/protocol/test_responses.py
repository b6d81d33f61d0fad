"""Wire types of the Responses API: bounds, nulls, and fields that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from argosy_protocol.errors import BadRequest
from argosy_protocol.responses import (
    NAMES_OF_CHAT_FIELDS,
    REFUSED_FIELDS,
    ResponseItem,
    ResponsesRequest,
    decode_responses_request,
    decoding_responses_request,
)
from case_tables import wrong_answers


def decoded(**fields: Any) -> ResponsesRequest:
    return decode_responses_request(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def message(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hi", **fields}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{}] * 4097}, "input"),
    (message(role=5), "input[0].role"),
    (message(content=[{"text": "x"}]), "input[0].content[0].type"),
    (message(content=[{"type": "input_text", "text": "x"}] * 1025), "input[0].content"),
    ({"instructions": 5}, "instructions"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"background": True, "store": False}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": -2}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"verbosity": "some"}}, "text.verbosity"),
    ({"reasoning": {"effort": "nope"}}, "reasoning.effort"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"reasoning": {"context": "some"}}, "reasoning.context"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "f"}] * 513}, "tools"),
    ({"truncation": "some"}, "truncation"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"user": "x" * 513}, "user"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"stop": ["x"] * 5}, "stop"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ({"data_parallel_rank": 0}, "data_parallel_rank"),
    *[({field: {"x": 1}}, field) for field in REFUSED_FIELDS],
    ({"n": 2}, "n"),
]


def refusal(fields: dict[str, Any]) -> tuple[str | None, str]:
    """Return the `param` and the message with which a request is refused."""
    try:
        return "accepted", repr(decoded(**fields))
    except BadRequest as error:
        return error.param, error.message


def test_a_value_out_of_bounds_names_its_field() -> None:
    told = [(fields, param, refusal(fields)) for fields, param in REFUSED]
    assert wrong_answers((fields, wanted, param) for fields, wanted, (param, _) in told) == {}
    names = {param: param.rpartition(".")[2].partition("[")[0] for _, param in REFUSED}
    assert [message for _, param, (_, message) in told if names[param] not in message] == []


def test_a_field_of_chats_is_refused_with_its_name_here() -> None:
    told = {field: refusal({field: 5}) for field in NAMES_OF_CHAT_FIELDS}
    wanted = {
        field: f"{field} is a field of chats; responses have {name}"
        for field, name in NAMES_OF_CHAT_FIELDS.items()
    }
    assert wrong_answers((field, field, param) for field, (param, _) in told.items()) == {}
    assert {field: message for field, (_, message) in told.items() if wanted[field] not in message} == {}


def test_null_counts_as_absent() -> None:
    names = {field.name for field in msgspec.structs.fields(ResponsesRequest)} - {"input"}
    assert decoded(**dict.fromkeys(names)) == decoded(model=None)


def test_every_field_of_openai_is_known() -> None:
    known = {field.name for field in msgspec.structs.fields(ResponsesRequest)}
    assert set(ResponseCreateParamsNonStreaming.__annotations__) - known == set()


HI = {"role": "user", "content": "hi"}
STRANGE: list[dict[str, Any]] = [
    {"type": "shiny_call", "content": {"a": 1}, "arguments": {"b": [2]}},
    {"type": "shiny_call", "id": 5, "name": [], "status": {}, "role": 7, "summary": "s", "output": None},
    {"type": "x" * 65, "text": "long"},
    {"type": "program", "code": "1", "call_id": "c" * 300},
    {"type": "mcp_call", "name": "n" * 300, "arguments": "{}", "output": "x" * 5000},
]


@pytest.mark.parametrize("item", STRANGE)
def test_an_item_of_another_server_is_read_by_its_type_only(item: dict[str, Any]) -> None:
    (read, _) = decoded(input=[item, HI]).input
    assert isinstance(read, ResponseItem)
    assert read == ResponseItem(type=item["type"][:64])


def test_an_id_that_is_none_of_ours_is_left_out() -> None:
    (long, empty) = decoded(input=[{**HI, "id": "x" * 257}, {**HI, "id": ""}]).input
    assert long == empty == ResponseItem(role="user", content="hi")


def test_what_is_wrong_with_an_item_of_ours_is_told_beside_one_of_another_server() -> None:
    assert refusal({"input": [STRANGE[0], {"role": "user", "content": 5}]})[0] == "input[1].content"


@pytest.mark.parametrize(
    "item", [{"type": "x", "content": {"a": "b" * 250}}, {"type": "x", "text": "b" * 250}]
)
def test_a_megabyte_of_items_of_another_server_is_read(item: dict[str, Any]) -> None:
    assert len(decoded(input=[*[item] * 4000, HI]).input) == 4001
    assert refusal({"input": [*[item] * 4096, HI]})[0] in ("input", "input[0].content")


def test_unknown_fields_are_ignored() -> None:
    assert decoded(newest_field={"x": 1}) == decoded()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"role": "user", "content": "x"}, "message"),
        ({"id": "msg_1"}, "item_reference"),
        ({"type": "reasoning", "id": "rs_1"}, "reasoning"),
        ({}, "message"),
    ],
)
def test_the_kind_of_an_item(fields: dict[str, Any], kind: str) -> None:
    assert msgspec.convert(fields, ResponseItem).kind == kind


def test_a_body_that_is_read_in_steps_is_read_as_one_that_is_not() -> None:
    unreadable = {"type": "of_the_future", "role": 5, "content": "text"}
    bodies = [
        {"input": "hi"},
        {"input": [*message()["input"], unreadable]},
        *(fields for fields, _ in REFUSED),
    ]
    for fields in bodies:
        body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
        steps = decoding_responses_request(body)
        assert (next(steps), next(steps)) == (None, None), "others have their turn twice at least"
        assert _outcome(lambda steps=steps: _last(steps)) == _outcome(
            lambda body=body: decode_responses_request(body)
        )  # type: ignore[misc]


def test_items_with_many_parts_are_looked_at_in_steps() -> None:
    """Three bytes each, they took a microsecond each: a body of 900 KB held a router's event loop for 200 ms."""
    content = [{}] * 1000
    body = json.dumps({"model": "m", "input": [{"role": "user", "content": content}] * 300}).encode()
    number = 0

    def read() -> None:
        nonlocal number
        for _ in decoding_responses_request(body):
            number += 1

    with pytest.raises(BadRequest):
        read()
    assert number >= len(body) // (32 * 1024)


def _outcome(read: Callable[[], ResponsesRequest]) -> ResponsesRequest | tuple[str, str | None]:
    try:
        return read()
    except BadRequest as error:
        return error.message, error.param


def _last(steps: Generator[None, None, ResponsesRequest]) -> ResponsesRequest:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            asked: ResponsesRequest = end.value
            return asked
