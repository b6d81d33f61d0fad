"""Reading of streamed responses: what their events add up to, and whether they came in OpenAI's order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

ENDS = ("response.completed", "response.incomplete", "response.failed")
PARTS = {"message": ("output_text", "output_text"), "reasoning": ("reasoning_text", "reasoning_text")}


def parsed_events(stream: bytes) -> list[dict[str, Any]]:
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


def final_response(events: Iterable[dict[str, Any]], *, first: int = 0) -> dict[str, Any]:
    """Return the response of the last event; asserts the order of all, and that they add up to it.

    Args:
        first: number of the first event.
    """
    events = list(events)
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    queued = ["response.queued"] if events[1]["type"] == "response.queued" else []
    expected = ["response.created", *queued, "response.in_progress"]
    opening = len(expected)
    assert [event["type"] for event in events[:opening]] == expected
    assert events[0]["response"]["output"] == []
    assert events[opening - 1]["response"]["status"] == "in_progress"
    output: list[dict[str, Any]] = []
    position = opening
    while events[position]["type"] not in ENDS:
        position = _read_item(events, position, len(output), output)
    assert position == len(events) - 1, "events after the last one"
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    made: dict[str, Any] = last["response"]
    assert made["output"] == output
    return made


def _read_item(events: list[dict[str, Any]], position: int, index: int, output: list[dict[str, Any]]) -> int:
    """Read one item's events; returns the position after them."""
    added = events[position]
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item = added["item"]
    assert item["status"] == "in_progress"
    own = []
    position += 1
    while events[position]["type"] != "response.output_item.done":
        event = events[position]
        assert (event["item_id"], event["output_index"]) == (item["id"], index)
        own.append(event)
        position += 1
    done = events[position]["item"]
    assert events[position]["output_index"] == index
    assert (done["id"], done["type"]) == (item["id"], item["type"])
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        *deltas, last = own
        assert last["type"] == "response.function_call_arguments.done"
        assert "".join(event["delta"] for event in deltas) == last["arguments"] == done["arguments"]
    else:
        assert item["content"] == []
        _check_text(own, item["type"], done)
    output.append(done)
    return position + 1


def _check_text(own: list[dict[str, Any]], kind: str, done: dict[str, Any]) -> None:
    part_type, name = PARTS[kind]
    begin, *deltas, text_done, part_done = own
    assert begin["type"] == "response.content_part.added"
    assert begin["part"]["type"] == part_type
    assert begin["part"]["text"] == ""
    assert {event["type"] for event in deltas} == {f"response.{name}.delta"}
    assert all(event["delta"] for event in deltas), "an empty delta"
    text = "".join(event["delta"] for event in deltas)
    assert text_done["type"] == f"response.{name}.done"
    assert text_done["text"] == text
    assert part_done["type"] == "response.content_part.done"
    assert [part_done["part"]] == done["content"]
    assert part_done["part"]["text"] == text
    if kind == "message":
        logprobs = [entry for event in deltas for entry in event["logprobs"]]
        assert logprobs == text_done["logprobs"] == part_done["part"]["logprobs"]
