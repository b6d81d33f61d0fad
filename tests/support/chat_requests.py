"""Requests to /v1/chat/completions, as the engine decodes them."""

from __future__ import annotations

import json

from argosy_protocol.openai import ChatCompletionRequest, decode_request


def chat(**fields: object) -> ChatCompletionRequest:
    request = decode_request("chat/completions", json.dumps(fields).encode())
    assert isinstance(request, ChatCompletionRequest)
    return request
