"""Conversations of stored responses: references, ids of items, pages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from argosy_protocol.errors import BadRequest, PayloadTooLarge, ResponseNotFound
from argosy_protocol.response_history import (
    MAX_REFERENCED_BYTES,
    STEP_BYTES,
    Steps,
    StoredResponse,
    done,
    identified_items,
    identifying,
    page_of_items,
    referenced_responses,
    resolved_items,
    resolving,
)
from argosy_protocol.responses import ResponseItem, ResponsesRequest, decode_responses_request

ANSWER = {
    "type": "message",
    "id": "msg_a_0",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
}


def request(**fields: Any) -> ResponsesRequest:
    return decode_responses_request(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def stored(status: str = "completed", items: int = 1, response_id: str = "resp_a") -> StoredResponse:
    state = {"id": response_id, "status": status, "output": [ANSWER]}
    given = [ResponseItem(role="user", content=f"question {number}") for number in range(items)]
    return StoredResponse(msgspec.Raw(json.dumps(state).encode()), identified_items(given, response_id))


def contents(items: list[ResponseItem]) -> list[Any]:
    return [
        item.content if isinstance(item.content, str) else [part.text for part in item.content or ()]
        for item in items
    ]


def test_a_response_continues_the_previous_one() -> None:
    asked = request(previous_response_id="resp_a")
    assert referenced_responses(asked) == ["resp_a"]
    conversation = resolved_items(asked, {"resp_a": stored()})
    assert contents(conversation) == [["question 0"], ["Hello!"], "hi"]
    assert [item.id for item in conversation] == ["msg_a_i0", "msg_a_0", None]


def test_items_are_found_by_their_ids() -> None:
    items = [
        {"type": "item_reference", "id": "msg_a_0"},
        {"id": "msg_a_i0"},
        {"role": "user", "content": "x"},
    ]
    asked = request(input=items)
    assert referenced_responses(asked) == ["resp_a"]
    assert contents(resolved_items(asked, {"resp_a": stored()})) == [["Hello!"], ["question 0"], "x"]


def test_what_is_not_stored_is_not_found() -> None:
    with pytest.raises(ResponseNotFound) as missing:
        resolved_items(request(previous_response_id="resp_b"), {})
    assert missing.value.http_status == 404
    assert missing.value.param == "previous_response_id"
    assert json.loads(missing.value.body())["error"]["type"] == "invalid_request_error"
    for name in ("msg_b_0", "msg_a_7", "nonsense"):
        asked = request(input=[{"id": name}])
        with pytest.raises(ResponseNotFound, match=name) as missing:
            resolved_items(asked, {"resp_a": stored()})
        assert missing.value.param == "input[0].id"


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_a_response_that_has_not_ended_cannot_be_continued(status: str) -> None:
    with pytest.raises(BadRequest, match=status) as refusal:
        resolved_items(request(previous_response_id="resp_a"), {"resp_a": stored(status)})
    assert refusal.value.param == "previous_response_id"


def test_references_are_bounded() -> None:
    items = [{"id": f"msg_{number}_0"} for number in range(65)]
    assert len(referenced_responses(request(input=items[:64]))) == 64
    with pytest.raises(BadRequest, match="more than 64"):
        referenced_responses(request(input=items))


def test_items_are_listed_as_openai_does() -> None:
    items = [
        ResponseItem(role="user", content="q"),
        ResponseItem(role="assistant", content="a"),
        ResponseItem(type="reasoning", content="t"),
        ResponseItem(type="function_call", id="fc_x", call_id="c", name="f", arguments="{}"),
        ResponseItem(type="function_call_output", call_id="c", output="r"),
    ]
    message, answer, thought, call, output = (
        json.loads(bytes(item)) for item in identified_items(items, "resp_z")
    )
    assert message == {
        "id": "msg_z_i0",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "q"}],
    }
    assert answer["content"] == [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    assert (thought["id"], thought["summary"]) == ("rs_z_i2", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "t"}]
    assert (call["id"], call["call_id"], call["arguments"]) == ("fc_x", "c", "{}")
    assert (output["id"], output["output"]) == ("fco_z_i4", "r")


def test_pages() -> None:
    record = stored(items=5)
    first = page_of_items(record, after=None, limit=2, order="desc")
    assert (first.first_id, first.last_id, first.has_more) == ("msg_a_i4", "msg_a_i3", True)
    second = page_of_items(record, after=first.last_id, limit=3, order="desc")
    assert (second.first_id, second.last_id, second.has_more) == ("msg_a_i2", "msg_a_i0", False)
    assert [json.loads(bytes(item))["id"] for item in second.data] == ["msg_a_i2", "msg_a_i1", "msg_a_i0"]
    oldest = page_of_items(record, after=None, limit=1, order="asc")
    assert oldest.first_id == "msg_a_i0"
    past = page_of_items(record, after="msg_a_i0", limit=9, order="desc")
    assert (past.data, past.first_id, past.has_more) == ([], None, False)
    with pytest.raises(BadRequest, match="after"):
        page_of_items(record, after="nonsense", limit=9, order="asc")


@pytest.mark.parametrize("is_output", [False, True])
def test_many_references_to_a_large_item_are_refused(is_output: bool) -> None:
    size, count = 1 << 20, 4000
    large = {"role": "assistant" if is_output else "user", "content": "x" * size}
    given = [ResponseItem(**large)]
    state = {
        "id": "resp_a",
        "status": "completed",
        "output": [{**large, "id": "msg_a_0"}] if is_output else [],
    }
    record = StoredResponse(
        msgspec.Raw(json.dumps(state).encode()), [] if is_output else identified_items(given, "resp_a")
    )
    reference = {"type": "item_reference", "id": "msg_a_0" if is_output else "msg_a_i0"}
    few = resolved_items(request(input=[reference] * 8), {"resp_a": record})
    assert len(few) == 8
    with pytest.raises(PayloadTooLarge, match=f"exceed {MAX_REFERENCED_BYTES} bytes") as refusal:
        resolved_items(request(input=[reference] * count), {"resp_a": record})
    assert refusal.value.param == "input"


@pytest.mark.parametrize("work", ["previous", "reference", "ids"])
def test_a_large_conversation_is_read_and_written_in_steps(work: str) -> None:
    """It was in one go, in the event loop of a router: a request of a hundred bytes that continues 20 MB held up all
    others for 200 ms."""
    given = [ResponseItem(role="user", content="x" * 8192) for _ in range(1024)]
    ids = identified_items(given, "resp_a")
    state = {"id": "resp_a", "status": "completed", "output": [ANSWER]}
    found = {"resp_a": StoredResponse(msgspec.Raw(json.dumps(state).encode()), ids)}
    fields = {"previous_response_id": "resp_a"} if work == "previous" else {"input": [{"id": "msg_a_i7"}]}
    steps: Steps[Any] = identifying(given, "resp_a") if work == "ids" else resolving(request(**fields), found)
    number = 0

    def counted() -> Steps[Any]:
        nonlocal number
        try:
            while True:
                next(steps)
                number += 1
                yield
        except StopIteration as end:
            return end.value

    result = done(counted())
    assert number >= (8 << 20) // STEP_BYTES
    assert result == (ids if work == "ids" else resolved_items(request(**fields), found))
