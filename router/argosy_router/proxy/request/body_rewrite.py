"""Rewriting of a few fields of a request's JSON object, while all others keep their bytes.

Must not know: which request needs it, and why.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from argosy_protocol.openai import StreamOptions

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_fields(body: bytes, changes: Mapping[str, str | int | StreamOptions | msgspec.Raw]) -> bytes:
    """Return `body` with other values of some fields.

    A key given twice keeps its last value, which is what every JSON decoder on the way reads.
    """
    fields = _fields.decode(body)
    for name, value in changes.items():
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


def with_another(body: bytes, field: bytes) -> bytes:
    """Append a field, given as JSON (`"name":value`), to `body`, which must not be an empty object.

    Nothing is decoded for this. If `body` has a field of that name already, as null, the last one counts.
    """
    return b"".join((memoryview(body)[: body.rindex(b"}")], b",", field, b"}"))
