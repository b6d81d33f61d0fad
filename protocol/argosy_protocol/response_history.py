"""Conversations of stored responses: what a response continues, and what its own continuation will.

Router and engine store the same record of a response, wherever they keep it. A record has the whole conversation up to
its response, so that it can be continued after the earlier responses have expired or were deleted.

Owns: the record, the ids of items, the resolution of references. Must not know: where records are kept, for how long,
and whose they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from argosy_protocol.errors import BadRequest, PayloadTooLarge, ResponseNotFound
from argosy_protocol.json_limits import Steps, done
from argosy_protocol.responses import (
    ID_PREFIX,
    ItemList,
    ResponseContentPart,
    ResponseItem,
    ResponseProgress,
    ResponsesRequest,
    ResponseState,
)
from argosy_protocol.responses_chat import input_items

MAX_REFERENCED = 64
"""Responses that the items of one input may refer to."""
MAX_REFERENCED_BYTES = 32 << 20
"""Bytes of the items that one input may refer to, each as often as it does: as many as a request's body may have.
Thousands of references of sixty bytes may all be to one item of a megabyte."""
STEP_BYTES: Final = 512 * 1024
"""Of items, for which a step of a generator here takes some milliseconds: a conversation may have 32 MB."""
STEP_ITEMS: Final = 8192
"""Of which only the ids are read in a step."""
MAX_PAGE = 100
DEFAULT_PAGE = 20
"""Items of one page of input items, as in OpenAI's API."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}
_OTHER_FIELDS = (
    *("action", "arguments", "author", "call_id", "content", "encrypted_content", "execution", "input"),
    *("name", "namespace", "output", "recipient", "role", "tools"),
)
"""What is kept of items of other types, as far as they have it."""
_decode_item = msgspec.json.Decoder(ResponseItem).decode


class _Identified(Struct, frozen=True):
    """An item of which nothing but the id is read, which takes a tenth of the time."""

    id: str | None = None


_decode_id = msgspec.json.Decoder(_Identified).decode
_decode_state = msgspec.json.Decoder(ResponseState).decode
_decode_progress = msgspec.json.Decoder(ResponseProgress).decode


class StoredResponse(Struct, frozen=True):
    """One response as it is kept."""

    response: msgspec.Raw
    """The response object, as clients get it."""
    items: list[msgspec.Raw]
    """The conversation before it, oldest item first, each with an id."""
    runner: str = ""
    """Of one that is generated in the background: what tells whether that goes on (the router's `RunHeartbeat`)."""

    def progress(self) -> ResponseProgress:
        """Whether it is over; its items are not decoded."""
        return _decode_progress(self.response)

    def state(self) -> ResponseState:
        return _decode_state(self.response)

    def encoded(self) -> bytes:
        """As JSON. An encoder grows its buffer, which takes six times as long for a long response."""
        items = b",".join(self.items)
        runner = msgspec.json.encode(self.runner)
        parts = (b'{"response":', self.response, b',"items":[', items, b'],"runner":', runner, b"}")
        return b"".join(parts)

    @property
    def size(self) -> int:
        """In bytes."""
        return len(bytes(self.response)) + sum(len(bytes(item)) for item in self.items)


def response_not_found(response_id: str) -> ResponseNotFound:
    """Return the error about a response that does not exist, or is another client's."""
    return ResponseNotFound(f"Response with id {response_id[:256]!r} not found.", param="response_id")


def referenced_responses(request: ResponsesRequest) -> list[str]:
    """Return the ids of the stored responses that a request needs.

    Raises:
        BadRequest: its items refer to too many.
    """
    needed: dict[str, None] = (
        {} if request.previous_response_id is None else {request.previous_response_id: None}
    )
    for item in _references(request):
        owner = _response_of(item.id or "")
        if owner is not None:
            needed[owner] = None
    if len(needed) > MAX_REFERENCED:
        raise BadRequest(f"input refers to items of more than {MAX_REFERENCED} responses", param="input")
    return list(needed)


def resolved_items(request: ResponsesRequest, stored: Mapping[str, StoredResponse]) -> list[ResponseItem]:
    """Do what `resolving` does at once."""
    return done(resolving(request, stored))


def resolving(request: ResponsesRequest, stored: Mapping[str, StoredResponse]) -> Steps[list[ResponseItem]]:
    """Return the whole conversation: that of the previous response, its output, and the input.

    Args:
        stored: those of `referenced_responses` that exist, by id.

    Raises:
        ResponseNotFound: the previous response or a referenced item does not exist.
        BadRequest: the previous response has not ended.
        PayloadTooLarge: the referenced items are too large together.
    """
    conversation: list[ResponseItem] = []
    previous = request.previous_response_id
    if previous is not None:
        record = stored.get(previous)
        if record is None:
            raise _previous_not_found(previous)
        state = record.state()
        if not state.is_finished:
            raise BadRequest(
                f"the response {previous!r} is {state.status}; wait until it has ended",
                param="previous_response_id",
            )
        conversation = yield from _items_of(record, state)
    known: dict[str, ResponseItem] | None = None
    sizes: dict[str, int] = {}
    size = 0
    for index, item in enumerate(input_items(request)):
        if item.kind != "item_reference":
            conversation.append(item)
            continue
        if known is None:
            known = yield from _by_id(stored.values())
        item_id = item.id or ""
        found = known.get(item_id)
        if found is None:
            raise ResponseNotFound(f"Item with id {item.id!r} not found.", param=f"input[{index}].id")
        if item_id not in sizes:
            sizes[item_id] = len(msgspec.json.encode(found))
        size += sizes[item_id]
        if size > MAX_REFERENCED_BYTES:
            raise PayloadTooLarge(
                f"the items that the input refers to exceed {MAX_REFERENCED_BYTES} bytes together",
                param="input",
            )
        conversation.append(found)
    return conversation


def identified_items(items: Iterable[ResponseItem], response_id: str) -> list[msgspec.Raw]:
    """Do what `identifying` does at once."""
    return done(identifying(items, response_id))


def identifying(items: Iterable[ResponseItem], response_id: str) -> Steps[list[msgspec.Raw]]:
    """Encode a conversation's items as OpenAI's API returns them, with ids for those that have none."""
    owner = response_id.removeprefix(ID_PREFIX)
    encoded: list[msgspec.Raw] = []
    size = 0
    for number, item in enumerate(items):
        data = msgspec.json.encode(_complete(item, f"{owner}_i{number}"))
        encoded.append(msgspec.Raw(data))
        size += len(data)
        if size >= STEP_BYTES:
            size = 0
            yield
    return encoded


def page_of_items(
    record: StoredResponse, *, after: str | None, limit: int, order: Literal["asc", "desc"]
) -> ItemList:
    """Do what `paging_items` does at once."""
    return done(paging_items(record, after=after, limit=limit, order=order))


def paging_items(
    record: StoredResponse, *, after: str | None, limit: int, order: Literal["asc", "desc"]
) -> Steps[ItemList]:
    """Return a page of a response's input items.

    Args:
        after: the id of the last item of the page before; None for the first page.

    Raises:
        BadRequest: no item has that id.
    """
    items = record.items if order == "asc" else record.items[::-1]
    ids: list[str | None] = []
    for number, item in enumerate(items, 1):
        ids.append(_decode_id(item).id)
        if number % STEP_ITEMS == 0:
            yield
    start = 0
    if after is not None:
        if after not in ids:
            raise BadRequest(f"after: there is no item {after[:256]!r}", param="after")
        start = ids.index(after) + 1
    page, shown = items[start : start + limit], ids[start : start + limit]
    return ItemList(
        data=page,
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
        has_more=start + limit < len(items),
    )


def _previous_not_found(response_id: str) -> ResponseNotFound:
    error = response_not_found(response_id)
    error.param, error.code = "previous_response_id", "previous_response_not_found"
    return error


def _references(request: ResponsesRequest) -> list[ResponseItem]:
    given = request.input
    return [] if isinstance(given, str) else [item for item in given if item.kind == "item_reference"]


def _response_of(item_id: str) -> str | None:
    """Return the id of the response to which an item belongs, as far as its id tells."""
    owner = item_id.partition("_")[2].rpartition("_")[0]
    return ID_PREFIX + owner if owner else None


def _items_of(record: StoredResponse, state: ResponseState) -> Steps[list[ResponseItem]]:
    items: list[ResponseItem] = []
    size = 0
    for item in record.items:
        items.append(_decode_item(item))
        size += len(bytes(item))
        if size >= STEP_BYTES:
            size = 0
            yield
    return [*items, *state.output]


def _by_id(records: Iterable[StoredResponse]) -> Steps[dict[str, ResponseItem]]:
    known: dict[str, ResponseItem] = {}
    for record in records:
        items = yield from _items_of(record, record.state())
        known |= {item.id: item for item in items if item.id}
    return known


def _complete(item: ResponseItem, default_id: str) -> dict[str, Any]:
    kind = item.kind
    made: dict[str, Any] = {
        "id": item.id or f"{_PREFIXES.get(kind, 'item')}_{default_id}",
        "type": kind,
        "status": item.status or "completed",
    }
    match kind:
        case "message":
            made |= {"role": item.role, "content": _parts(item.content, item.role == "assistant")}
        case "reasoning":
            made |= {
                "summary": item.summary or [],
                "content": _reasoning(item.content),
                "encrypted_content": item.encrypted_content,
            }
        case "function_call":
            made |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            if item.namespace is not None:
                made["namespace"] = item.namespace
        case "function_call_output":
            made |= {"call_id": item.call_id, "output": item.output}
        case _:
            values = {field: getattr(item, field) for field in _OTHER_FIELDS}
            made |= {field: value for field, value in values.items() if value is not None}
    return made


def _reasoning(content: str | list[ResponseContentPart] | None) -> list[ResponseContentPart]:
    if isinstance(content, str):
        return [ResponseContentPart(type="reasoning_text", text=content)]
    return content or []


def _parts(content: str | Sequence[ResponseContentPart] | None, is_output: bool) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [ResponseContentPart(type="output_text" if is_output else "input_text", text=content)]
    parts: list[dict[str, Any]] = [msgspec.to_builtins(part) for part in content or ()]
    return [
        {**part, "annotations": [], "logprobs": []} if part["type"] == "output_text" else part
        for part in parts
    ]
