"""Null stands for a field's default in every request."""

from __future__ import annotations

import json

import msgspec
import pytest

from argosy_protocol.openai import (
    ChatCompletionRequest,
    ChatTokenizeRequest,
    CompletionRequest,
    InternalFields,
    StreamOptions,
    TextTokenizeRequest,
    decode_request,
    decode_tokenize_request,
)
from argosy_protocol.pooling import EmbeddingRequest, decode_embedding_request

CHAT = {"messages": [{"role": "user", "content": "x"}]}
CASES = [
    (ChatCompletionRequest, CHAT, lambda body: decode_request("chat/completions", body)),
    (CompletionRequest, {"prompt": "x"}, lambda body: decode_request("completions", body)),
    (EmbeddingRequest, {"input": "x"}, decode_embedding_request),
    (ChatTokenizeRequest, CHAT, decode_tokenize_request),
    (TextTokenizeRequest, {"prompt": "x"}, decode_tokenize_request),
]


@pytest.mark.parametrize(
    ("kind", "needed", "decode"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_field_that_is_null_gets_its_default(kind: type, needed: dict, decode) -> None:  # type: ignore[no-untyped-def,type-arg]
    optional = [field.name for field in msgspec.structs.fields(kind) if field.name not in needed]
    assert len(optional) > 2
    nulls = decode(json.dumps({**needed, **dict.fromkeys(optional)}).encode())
    assert nulls == decode(json.dumps(needed).encode())
    assert isinstance(nulls, InternalFields)


def test_null_in_stream_options() -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    assert decode_request("chat/completions", json.dumps(body).encode()).stream_options == StreamOptions()
