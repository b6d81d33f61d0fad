"""Reading of streamed messages: what their events add up to, and whether they came in Anthropic's order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

TEXT_OF = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a whole stream, comments left out."""
    events = []
    for lines in stream.decode().removesuffix("\n\n").split("\n\n"):
        told = [line for line in lines.split("\n") if not line.startswith(":")]
        if not told:
            continue
        kind, data = told
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def message(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events add up to; asserts their order."""
    first, *rest = events
    assert first["type"] == "message_start"
    made: dict[str, Any] = first["message"]
    assert made["content"] == []
    assert made["stop_reason"] is None
    content, is_open, pings, is_over = made["content"], False, 0, False
    for event in rest:
        assert not is_over
        match event["type"]:
            case "ping":
                pings += 1
                assert len(content) == 1
            case "content_block_start":
                assert not is_open
                assert made["stop_reason"] is None
                assert event["index"] == len(content)
                content.append(event["content_block"] | {"json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(content) - 1
                _add(content[-1], event["delta"])
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(content) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                made |= event["delta"]
                made["usage"] = event["usage"]
            case "message_stop":
                assert made["stop_reason"] is not None
                is_over = True
            case kind:
                raise AssertionError(kind)
    assert is_over
    assert pings == (1 if content else 0)
    for block in content:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return made


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "input_json_delta":
            assert block["type"] == "tool_use"
            block["json"] += delta["partial_json"]
        case "signature_delta":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case kind:
            expected, field = TEXT_OF[block["type"]]
            assert kind == expected
            assert delta[field], "an empty delta"
            block[field] += delta[field]
