"""Answers of engines that choose the ids of their responses themselves, made into this router's responses.

Owns: which parts of an answer say whose response it is. Must not know: where responses are stored, who waits for them.
Invariant: an answer that has the router's id already is left as it is.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from argosy_router.http.sse import named_data, response_events

_ID: Final = re.compile(rb'"id":\s?"(resp_[^"]{1,200})"')
_STATE_EVENT: Final = response_events(
    b"created", b"queued", b"in_progress", b"completed", b"incomplete", b"failed"
)
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class AdoptedAnswer:
    """One answer, whole or in pieces."""

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


def with_response_fields(response: bytes, fields: dict[str, msgspec.Raw]) -> bytes:
    """Return a response, given as JSON, with some of its fields replaced; as it is if it is no JSON object."""
    try:
        return msgspec.json.encode(_decode_fields(response) | fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return response


def event_with_response_fields(event: bytes, fields: dict[str, msgspec.Raw]) -> bytes:
    """Return one event of a stream; if it has the response, with some fields of that replaced."""
    found = named_data(event, _STATE_EVENT)
    if found is None:
        return event
    start, end = found
    try:
        data = _decode_fields(event[start:end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return event
    response = data.get("response")
    if response is None:
        return event
    data["response"] = msgspec.Raw(with_response_fields(bytes(response), fields))
    return event[:start] + msgspec.json.encode(data) + event[end:]
