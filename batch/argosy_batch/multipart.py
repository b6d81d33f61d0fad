"""Incremental parser of multipart/form-data (RFC 7578).

Owns: where a part begins and ends, and the limits on heads and their number. Must not know: what parts mean.
Invariant: any split of the same bytes gives the same parts; at most a head or a delimiter is held.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, Protocol

from argosy_protocol.errors import BadRequest

MAX_HEAD_BYTES: Final = 8 * 1024
MAX_PARTS: Final = 32
MAX_BOUNDARY_BYTES: Final = 70
"""RFC 2046, 5.1.1."""
_BOUNDARY: Final = re.compile(rb';\s*boundary=(?:"([^"]+)"|([^;\s"]+))', re.IGNORECASE)
_PARAMETER: Final = re.compile(rb';\s*([A-Za-z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))')


class PartListener(Protocol):
    """Receives the parts of a form, one after another. Each method may raise ApiError, which ends the parsing."""

    def on_part(self, name: str, filename: str | None) -> None:
        """A part begins; `filename` is as the client sent it, None if it sent none."""
        ...

    def on_part_data(self, data: bytes) -> None: ...

    def on_part_end(self) -> None: ...


class _State(Enum):
    PREAMBLE = "before the first part"
    DELIMITED = "right behind a delimiter"
    HEAD = "in a part's head"
    DATA = "in a part's data"
    END = "behind the last part"


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary that a content type declares.

    Raises:
        BadRequest: it is not multipart/form-data, or has no usable boundary.
    """
    if content_type.partition(b";")[0].strip().lower() != b"multipart/form-data":
        raise BadRequest("content-type must be multipart/form-data")
    match = _BOUNDARY.search(content_type)
    boundary = (match[1] or match[2]) if match is not None else b""
    if not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES:
        raise BadRequest("multipart/form-data needs a boundary of 1 to 70 characters")
    return boundary


class MultipartParser:
    """Parses one body."""

    def __init__(self, boundary: bytes, listener: PartListener) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._listener = listener
        self._held = bytearray(b"\r\n")  # the first delimiter may begin the body
        self._state = _State.PREAMBLE
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last part has ended."""
        return self._state is _State.END

    def feed(self, data: bytes) -> None:
        """Parse more bytes.

        Raises:
            BadRequest: malformed, or out of bounds.
        """
        if self._state is _State.END:
            return
        self._held += data
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Parse what is held as far as one step goes; return whether another one may go further."""
        state = self._state
        if state is _State.PREAMBLE or state is _State.DATA:
            return self._find_delimiter()
        if state is _State.DELIMITED:
            return self._end_delimiter()
        return self._read_head() if state is _State.HEAD else False

    def _find_delimiter(self) -> bool:
        at = self._held.find(self._delimiter)
        end = at if at >= 0 else len(self._held) - len(self._delimiter) + 1
        if self._state is _State.DATA and end > 0:
            self._listener.on_part_data(bytes(self._held[:end]))
        if at < 0:
            if end > 0:
                del self._held[:end]
            return False
        del self._held[: at + len(self._delimiter)]
        if self._state is _State.DATA:
            self._listener.on_part_end()
        self._state = _State.DELIMITED
        return True

    def _end_delimiter(self) -> bool:
        held = self._held
        if len(held) < 2:
            return False
        if held.startswith(b"--"):
            self._state = _State.END
            held.clear()
            return False
        end = held.find(b"\r\n")
        if held[: max(0, end)].strip(b" \t") or (end < 0 and len(held) > MAX_BOUNDARY_BYTES):
            raise BadRequest("malformed multipart body: a line with a boundary has more than the boundary")
        if end < 0:
            return False
        del held[:end]  # the line break stays: a head may be empty
        self._state = _State.HEAD
        return True

    def _read_head(self) -> bool:
        end = self._held.find(b"\r\n\r\n")
        if max(end, 0) > MAX_HEAD_BYTES or (end < 0 and len(self._held) > MAX_HEAD_BYTES):
            raise BadRequest("malformed multipart body: the head of a part is too large")
        if end < 0:
            return False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadRequest(f"the form has more than {MAX_PARTS} parts")
        name, filename = _names(bytes(self._held[:end]))
        del self._held[: end + 4]
        self._state = _State.DATA
        self._listener.on_part(name, filename)
        return True


def _names(head: bytes) -> tuple[str, str | None]:
    """The names of the part and its file.

    Raises:
        BadRequest: the head has no name.
    """
    for line in head.split(b"\r\n"):
        title, _, value = line.partition(b":")
        if title.strip().lower() != b"content-disposition":
            continue
        given = {
            match[1].lower(): match[3] if match[2] is None else re.sub(rb"\\(.)", rb"\1", match[2])
            for match in _PARAMETER.finditer(value)
        }
        filename = given.get(b"filename")
        if b"name" in given and value.partition(b";")[0].strip().lower() == b"form-data":
            return _text(given[b"name"]), None if filename is None else _text(filename)
    raise BadRequest("malformed multipart body: a part has no content-disposition with a name")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
