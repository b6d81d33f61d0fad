"""Sampling parameters of API requests: what every sequence of a call carries is bounded for the call."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.input_processor import (
    MAX_ALLOWED_IDS_OF_A_CALL,
    MAX_GRAMMAR_TEXT_OF_A_CALL,
    to_sampling_params,
)
from argosy_engine.params import SamplingParams
from argosy_engine.resolved_config import SamplingDefaults
from argosy_engine.structured import structured_outputs_params
from argosy_engine.structured.structural_tag import tool_call_tag
from argosy_protocol.openai import CompletionRequest, decode_request

VOCAB = 2048
PROMPTS = 1024
CONFIG: Any = SimpleNamespace(vocab_size=VOCAB, max_logprobs=20)


def params(num_prompts: int = 1, **fields: Any) -> SamplingParams:
    return to_sampling_params(
        CompletionRequest(prompt="x", **fields), SamplingDefaults(), CONFIG, num_prompts
    )


def test_allowed_tokens_are_sent_once_each() -> None:
    assert params(allowed_token_ids=[7, 3] * (VOCAB // 2)).allowed_token_ids == (3, 7)
    assert params(allowed_token_ids=list(range(VOCAB))).allowed_token_ids == tuple(range(VOCAB))
    with pytest.raises(InvalidRequest, match="name each token once") as refused:
        params(allowed_token_ids=[7] * (VOCAB + 1))
    assert refused.value.param == "allowed_token_ids"


@pytest.mark.parametrize("n", [1, 4])
def test_allowed_tokens_of_a_call_are_bounded_over_its_sequences(n: int) -> None:
    most = list(range(MAX_ALLOWED_IDS_OF_A_CALL // PROMPTS // n))
    assert params(PROMPTS, n=n, allowed_token_ids=most).allowed_token_ids == tuple(most)
    with pytest.raises(InvalidRequest, match="send fewer prompts or choices") as refused:
        params(PROMPTS, n=n, allowed_token_ids=[*most, VOCAB - 1])
    assert refused.value.param == "allowed_token_ids"


@pytest.mark.parametrize("n", [1, 4])
def test_the_grammar_of_a_call_is_bounded_over_its_sequences(n: int) -> None:
    def asked(size: int) -> dict[str, Any]:
        return {"grammar": "root ::= [a-z]+" + " " * (size - 15)}

    most = MAX_GRAMMAR_TEXT_OF_A_CALL // PROMPTS // n
    assert params(PROMPTS, n=n, structured_outputs=asked(most)).structured_outputs is not None
    assert params(1, structured_outputs=asked(most + 1)).structured_outputs is not None
    with pytest.raises(InvalidRequest, match="send fewer prompts or choices") as refused:
        params(PROMPTS, n=n, structured_outputs=asked(most + 1))
    assert refused.value.param == "structured_outputs"


def test_a_large_schema_of_a_large_call_is_refused_by_the_field_that_the_client_sent() -> None:
    schema = {"type": "object", "description": "a" * (2 * MAX_GRAMMAR_TEXT_OF_A_CALL // PROMPTS)}
    described = {"type": "object", "properties": {"a" * (MAX_GRAMMAR_TEXT_OF_A_CALL // PROMPTS): schema}}
    with pytest.raises(InvalidRequest, match="send fewer prompts or choices") as refused:
        params(
            PROMPTS,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": described}},
        )
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 2}, "best_of is not supported without use_beam_search"),
        ({"prompt_embeds": "x"}, "prompt_embeds is not supported by this engine"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids needs logprobs"),
        (
            {"logits_processors": ["a"]},
            "logits_processors is not supported in requests; the engine's flag --logits-processors has them",
        ),
        (
            {"guided_whitespace_pattern": ""},
            "guided_whitespace_pattern is not supported by this engine; use structured_outputs, with "
            "disable_any_whitespace",
        ),
        (
            {"response_format": {}},
            "response_format.type must be text, json_object, json_schema or structural_tag, not 'None'",
        ),
    ],
)
def test_a_refused_field_of_completions_tells_its_remedy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        params(**fields)
    assert str(refused.value) == message
    assert (refused.value.param or "").partition(".")[0] == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"verbosity": "low"}, "verbosity"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_what_responses_refuse_chats_refuse(fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(InvalidRequest) as refused:
        to_sampling_params(
            decode_request("chat/completions", json.dumps(body).encode()), SamplingDefaults(), CONFIG
        )
    assert refused.value.param == param


def test_fields_of_newer_chats_that_ask_for_nothing_are_accepted() -> None:
    fields = {"verbosity": "medium", "audio": None, "logits_processors": [], "stream": True}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        **fields,
        "stream_options": {"include_obfuscation": False},
    }
    to_sampling_params(
        decode_request("chat/completions", json.dumps(body).encode()), SamplingDefaults(), CONFIG
    )


def test_a_refused_field_of_chats_tells_its_replacement() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]}
    with pytest.raises(InvalidRequest, match=r"^functions is not supported by this engine; use tools$"):
        to_sampling_params(
            decode_request("chat/completions", json.dumps(body).encode()), SamplingDefaults(), CONFIG
        )


def test_the_schemas_of_tools_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_outputs_params, "normalized_tag", lambda _: pytest.fail("checked again"))
    function = {"name": "f", "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}
    request = decode_request(
        "chat/completions",
        json.dumps({**body, "tools": [{"type": "function", "function": function}]}).encode(),
    )
    asked = to_sampling_params(request, SamplingDefaults(), CONFIG).structured_outputs
    assert asked is not None
    assert asked.spec().text == tool_call_tag([{"type": "function", "function": function}])
