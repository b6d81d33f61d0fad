"""Requests to /v1/responses, and what fake engines answer to them."""

from __future__ import annotations

from typing import Any

import msgspec

from .fake_engine import MODEL

PATH = "/v1/responses"
USAGE = {
    "input_tokens": 12,
    "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 15,
}
PART = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
ITEM = {"id": "msg_1_0", "type": "message", "status": "completed", "role": "assistant", "content": [PART]}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": 16, "input": "hi", **fields}


def whole(model: str = MODEL, **fields: Any) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": model,
        "output": [ITEM],
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "usage": USAGE,
        **fields,
    }


def stream(model: str = MODEL) -> bytes:
    begun = whole(model, status="in_progress", output=[], usage=None)
    here: dict[str, Any] = {"item_id": "msg_1_0", "output_index": 0}
    item = {**ITEM, "status": "in_progress", "content": []}
    told: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": begun}),
        ("in_progress", {"response": begun}),
        ("output_item.added", {"output_index": 0, "item": item}),
        ("content_part.added", {**here, "content_index": 0, "part": {**PART, "text": ""}}),
        ("output_text.delta", {**here, "content_index": 0, "delta": "hello", "logprobs": []}),
        ("output_text.done", {**here, "content_index": 0, "text": "hello", "logprobs": []}),
        ("content_part.done", {**here, "content_index": 0, "part": PART}),
        ("output_item.done", {"output_index": 0, "item": ITEM}),
        ("completed", {"response": whole(model)}),
    ]
    events = []
    for number, (name, fields) in enumerate(told):
        kind = f"response.{name}"
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
    return b"".join(events)
