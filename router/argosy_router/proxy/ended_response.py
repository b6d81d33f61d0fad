"""Responses of the Responses API in what engines answer and in records: where they are, whether they have ended, and
whose they are.

Owns: which parts of an answer are the response, and say whose it is; the parts of a record. Must not know: where
records are stored, who waits for them, which process reads them (`large_bodies`).
Invariant: an answer that has the router's id already is left as it is.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from argosy_protocol.response_history import StoredResponse
from argosy_protocol.responses import ResponseItem, ResponseState, ResponseStatus
from argosy_router.http.sse import edges, named_data, named_events, response_events

# Not compiled: msgspec reads the annotations.


Fields = dict[str, bytes]
"""Fields of a response, each as JSON."""

_ID: Final = re.compile(rb'"id":\s?"(resp_[^"]{1,200})"')
_LAST_EVENT: Final = response_events(b"completed", b"incomplete", b"failed")
_STATE_EVENT: Final = response_events(
    b"created", b"queued", b"in_progress", b"completed", b"incomplete", b"failed"
)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Event(msgspec.Struct):
    response: msgspec.Raw


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_state: Final = msgspec.json.Decoder(ResponseState).decode
_decode_record: Final = msgspec.json.Decoder(StoredResponse).decode
_decode_item: Final = msgspec.json.Decoder(ResponseItem).decode
_RECORD_BEGIN: Final = len(b'{"response":')
_ITEMS_BEGIN: Final = len(b',"items":[')
ITEMS_PER_TURN: Final = 8192
"""Of a record, put in their places between two turns of the event loop, in some milliseconds."""
MAX_RENAMED: Final = 4096
"""Ids that are replaced in one piece of an answer: each event of its response has one or two. A piece that is full of
them would take ten times as much memory."""
TURN_BYTES: Final = 512 << 10
"""Of a response's output, read between two turns."""


class FoundResponse(msgspec.Struct):
    """What was found in an answer, or in events of a stream."""

    begin: int = 0
    end: int = 0
    """Where the response is; both zero if there is none."""
    is_ended: bool = False
    """Whether it is a response that has ended: only such a one can be stored."""
    own: bytes | None = None
    """The response with other values of fields, if there were any."""

    def response_in(self, data: bytes) -> msgspec.Raw:
        """Return the response, without a copy."""
        return msgspec.Raw(memoryview(data)[self.begin : self.end] if self.own is None else self.own)

    def own_event(self, event: bytes) -> bytes:
        """Return the event with what replaces its response."""
        own = self.own
        return event if own is None else b"".join((event[: self.begin], own, event[self.end :]))


Find = Callable[[str, bytes, bool, Fields], Awaitable[FoundResponse]]
"""`found_response` for an account of this name, perhaps by another process (`LargeBodies.find_response`)."""


def found_response(data: bytes, is_event: bool, fields: Fields) -> FoundResponse:
    """Find the response in an answer.

    Args:
        is_event: the answer is events of a stream, of which the last of the response is looked at.
        fields: values to replace.
    """
    found = FoundResponse(0, len(data))
    response = data
    if is_event:
        place = named_data(data, _LAST_EVENT) or named_data(data, _STATE_EVENT)
        if place is None:
            return FoundResponse()
        try:
            response = bytes(_decode_event(data[place[0] : place[1]]).response)
        except _UNREADABLE:
            return FoundResponse()
        found.begin = data.index(response, place[0])
        found.end = found.begin + len(response)
    try:
        found.is_ended = _decode_state(response).is_finished
    except _UNREADABLE:
        found.is_ended = False
    if fields:
        found.own = _with_fields(response, fields)
    return found


async def find_at_once(_: str, data: bytes, is_event: bool, fields: Fields) -> FoundResponse:
    """Find the response in an answer in this process."""
    return found_response(data, is_event, fields)


def _with_fields(response: bytes, fields: Fields) -> bytes | None:
    """Return a response with some of its fields replaced; None if it is no JSON object."""
    try:
        known = _decode_fields(response)
    except _UNREADABLE:
        return None
    return msgspec.json.encode(known | {name: msgspec.Raw(value) for name, value in fields.items()})


class FoundRecord(msgspec.Struct):
    """The parts of a record, by their lengths in bytes, and what its response says of itself."""

    id: str = ""
    status: ResponseStatus = "failed"
    created_at: float = 0
    background: bool = False
    runner: str = ""
    response_bytes: int = 0
    item_bytes: bytes = b""
    """8-byte integers of this machine."""
    output_bytes: bytes = b""
    """Those of the items of its output, which follow; empty if they were not asked for."""


class ReadRecord(StoredResponse, frozen=True):
    """A record whose response another process has read."""

    known: ResponseState | None = None
    num_bytes: int = 0

    def state(self) -> ResponseState:
        return super().state() if self.known is None else self.known

    @property
    def size(self) -> int:
        return self.num_bytes


def found_record(data: bytes, *, has_output: bool) -> tuple[FoundRecord, bytes]:
    """Find the parts of a record; return them with the items of the response's output, each as JSON.

    Args:
        has_output: whether the output is wanted: a request continues the response.

    Raises:
        ValueError: it is no record, or not written as `StoredResponse.encoded` does.
    """
    try:
        record = _decode_record(data)
        state = record.state()
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if record.encoded() != data:
        raise ValueError("it is written otherwise")
    output = [msgspec.json.encode(item) for item in state.output] if has_output else []
    found = FoundRecord(
        state.id,
        state.status,
        state.created_at,
        state.background,
        record.runner,
        memoryview(record.response).nbytes,
        _lengths(record.items),
        _lengths(output),
    )
    return found, b"".join(output)


def _lengths(parts: Sequence[bytes | msgspec.Raw]) -> bytes:
    return array("Q", [memoryview(part).nbytes for part in parts]).tobytes()


async def read_record(data: bytes, found: FoundRecord, output: bytes) -> ReadRecord:
    """Return a record whose parts were found, in turns."""
    view = memoryview(data)
    at = _RECORD_BEGIN + found.response_bytes
    response = msgspec.Raw(view[_RECORD_BEGIN:at])
    at += _ITEMS_BEGIN
    items: list[msgspec.Raw] = []
    for number, length in enumerate(array("Q", found.item_bytes), 1):
        items.append(msgspec.Raw(view[at : at + length]))
        at += length + 1
        if number % ITEMS_PER_TURN == 0:
            await asyncio.sleep(0)
    state = ResponseState(found.id, found.status, found.created_at, found.background, [])
    begin = turn = 0
    for length in array("Q", found.output_bytes):
        state.output.append(_decode_item(output[begin : begin + length]))
        begin += length
        if begin - turn >= TURN_BYTES:
            turn = begin
            await asyncio.sleep(0)
    return ReadRecord(response, items, found.runner, state, len(data))


def decoded_record(data: bytes) -> StoredResponse:
    """Read a short record at once.

    Raises:
        ValueError: it is none.
    """
    try:
        return _decode_record(data)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def begins_last(events: bytes) -> bool:
    """Whether one of some events ends the response."""
    return next(named_events(edges(events), _LAST_EVENT), None) is not None


def has_response(event: bytes) -> bool:
    """Whether an event has the response."""
    return next(named_events(event, _STATE_EVENT), None) is not None


class AdoptedAnswer:
    """One answer, whole or in pieces, of an engine that may choose the ids of its responses itself."""

    def __init__(self, response_id: str) -> None:
        self._id = response_id.encode()
        self._other_id: bytes | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether what was seen of the answer has another id."""
        return self._other_id is not None and self._other_id != self._id

    def renamed(self, data: bytes) -> bytes:
        """Return the answer, or its next piece, with the router's id of the response."""
        if self._other_id is None and (found := _ID.search(data)) is not None:
            self._other_id = found[1]
        if self._other_id is None or not self.is_foreign:
            return data
        return data.replace(b'"%b"' % self._other_id, b'"%b"' % self._id, MAX_RENAMED)
