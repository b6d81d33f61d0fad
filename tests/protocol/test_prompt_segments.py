"""The segments of a request: values in prompt order."""

from __future__ import annotations

import json

from argosy_protocol.chunk_hash import Segment, SegmentKind, prompt_segments
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage, decode_request


def view(**fields: object) -> list[Segment]:
    (segments,) = prompt_segments(decode_request("chat/completions", json.dumps(fields).encode()))
    return segments


def test_the_view_depends_on_values_not_on_their_serialisation() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}
    swapped = {"function": {"parameters": {"b": 2, "a": 1}, "name": "f"}, "type": "function"}
    messages = [{"role": "user", "content": "h\u00e9llo"}]
    plain = json.dumps({"messages": messages, "tools": [tool]}, ensure_ascii=False).encode()
    escaped = json.dumps({"tools": [swapped], "messages": messages}, indent=3).encode()
    assert prompt_segments(decode_request("chat/completions", plain)) == prompt_segments(
        decode_request("chat/completions", escaped)
    )


def test_the_view_is_in_prompt_order() -> None:
    segments = view(
        messages=[
            {"role": "system", "content": "S"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "U"}, {"type": "image_url", "image_url": {"url": "x"}}],
            },
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs={"enable_thinking": False},
    )
    kinds = [segment[0] for segment in segments]
    assert kinds == [
        SegmentKind.TOOLS,
        SegmentKind.TEMPLATE,
        SegmentKind.ROLE,
        SegmentKind.TEXT,
        SegmentKind.ROLE,
        SegmentKind.TEXT,
        SegmentKind.DIGEST,
    ]


def test_a_batch_has_one_chain_per_prompt() -> None:
    request = decode_request("completions", b'{"prompt": ["a", "b"]}')
    assert [segments[0][1] for segments in prompt_segments(request)] == [b"a", b"b"]


def test_calls_and_refusals_of_older_models_are_part_of_the_prompt() -> None:
    call = {"name": "f", "arguments": "{}"}
    (role, segment) = view(messages=[{"role": "assistant", "content": None, "function_call": call}])
    assert (role[0], segment[0], json.loads(segment[1])) == (SegmentKind.ROLE, SegmentKind.TOOL_CALLS, call)
    refused = view(messages=[{"role": "assistant", "content": None, "refusal": "No."}])
    assert refused == view(messages=[{"role": "assistant", "content": "No."}])


def test_the_digest_of_an_image_does_not_change_once_it_is_history() -> None:
    """A Responses request translates an image of its newest message otherwise than one that was answered."""
    parts = [{"type": "image_url", "image_url": {"url": "x"}} | fields for fields in ({}, {"or_note": True})]
    first, later = (
        prompt_segments(ChatCompletionRequest(messages=[ChatMessage(role="user", content=[part])]))
        for part in parts
    )
    assert first == later
