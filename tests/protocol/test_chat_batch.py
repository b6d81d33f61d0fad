"""A batch of chats is its chats, with the same parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_protocol.chunk_hash import prompt_segments
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import decode_batch_request, decode_request

HI, BYE = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "bye"}]


def encoded(messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_its_chats_have_the_fields_of_the_batch() -> None:
    fields = {"temperature": 0.5, "max_tokens": 3, "logprobs": None, "chat_template_kwargs": {"a": 1}}
    batch = decode_batch_request(encoded([HI, BYE], n=1, stream=None, **fields))
    alone = [decode_request("chat/completions", encoded(chat, n=1, **fields)) for chat in (HI, BYE)]
    assert batch.chats() == alone
    assert prompt_segments(batch) == [prompt_segments(chat)[0] for chat in alone]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (encoded([]), "messages"),
        (encoded(HI), "messages[0]"),
        (encoded([HI, []]), "messages[1]"),
        (encoded([HI] * 1025), "messages"),
        (encoded([HI, [{"role": "user", "content": None}]]), "messages[1][0].content"),
        (encoded([HI], stream=True), "stream"),
        (encoded([HI], n=2), "n"),
        (encoded([HI], use_beam_search=True), "use_beam_search"),
        (encoded([HI], prompt_logprobs=1), "prompt_logprobs"),
        (encoded([HI], tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (encoded([HI], tools=[]), "tools"),
        (encoded([HI], tool_choice="auto"), "tool_choice"),
        (encoded([HI], temperature=3), "temperature"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(body: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decode_batch_request(body)
    assert refused.value.param == param
    assert param in refused.value.message
