"""EventTemplate: the bytes of the events of one stream that differ in one text, encoded once.

Almost every event of a stream adds a piece of text to one choice, and all of its other fields are those of the event
before. The bytes around the text are encoded once, so that an event costs the encoding of one string.
"""

from __future__ import annotations

import msgspec

_ENCODER = msgspec.json.Encoder()


class EventTemplate:
    """
    Args:
        chunk: an event in which the field `name`, and no other of this name, has an empty text.
    """

    def __init__(self, chunk: msgspec.Struct, name: str) -> None:
        field = b'"%b":' % name.encode()
        # No string can contain this, since quotes within strings are escaped.
        head, _, tail = encode_event(chunk).partition(field + b'""')
        self._head = head + field
        self._tail = tail

    def event(self, text: str) -> bytes:
        """Return the event, with its end, that has this text."""
        return b"%b%b%b" % (self._head, _ENCODER.encode(text), self._tail)


def encode_event(chunk: msgspec.Struct) -> bytes:
    """Return a server-sent event, with its end."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)
