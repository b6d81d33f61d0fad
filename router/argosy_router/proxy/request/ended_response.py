"""Responses of the Responses API in what engines answer: where they are, whether they have ended, and whose they are.

Owns: which parts of an answer are the response, and say whose it is. Must not know: where responses are stored, who
waits for them, which process reads them (`large_bodies`).
Invariant: an answer that has the router's id already is left as it is.
"""

# Not compiled: msgspec reads the annotations.

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from argosy_protocol.response_object import ResponseState
from argosy_router.http.sse import edges, named_data, named_events, response_events

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


Find = Callable[[bytes, bool, Fields], Awaitable[FoundResponse]]
"""`found_response`, perhaps by another process."""


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


async def find_at_once(data: bytes, is_event: bool, fields: Fields) -> FoundResponse:
    """Find the response in an answer in this process."""
    return found_response(data, is_event, fields)


def _with_fields(response: bytes, fields: Fields) -> bytes | None:
    """Return a response with some of its fields replaced; None if it is no JSON object."""
    try:
        known = _decode_fields(response)
    except _UNREADABLE:
        return None
    return msgspec.json.encode(known | {name: msgspec.Raw(value) for name, value in fields.items()})


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
        return data.replace(b'"%b"' % self._other_id, b'"%b"' % self._id)
