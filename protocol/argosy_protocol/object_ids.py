"""Ids of objects: they cannot be guessed, and tell when an object was made and when it expires.

    file-019abf1c0de6929d7f0083c2b1d2...   prefix, created (11 hexadecimal digits, ms), expires (9, s), 32 random

So a listing is in the order of creation, and the sweep finds what has expired without reading it. The random part has
128 bits.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

_ID: Final = re.compile(r"[a-z]{2,16}[-_]([0-9a-f]{11})([0-9a-f]{9})[0-9a-f]{32}")


def new_id(prefix: str, now: float, ttl_s: float) -> str:
    """Return a new id.

    Args:
        prefix: as OpenAI's ids have it, with its separator: `file-`, `batch_`, `resp_`.
        now: seconds since the epoch.
        ttl_s: how long the object lives.
    """
    return f"{prefix}{int(now * 1000):011x}{int(now + ttl_s):09x}{secrets.token_hex(16)}"


def is_id(text: str) -> bool:
    """Whether a text has the form of an id; only then it is safe in a key of the storage."""
    return _ID.fullmatch(text) is not None


def created_at(object_id: str) -> float:
    """When the object was made, in seconds since the epoch. The id must be valid (`is_id`)."""
    return int(_match(object_id)[1], 16) / 1000


def expires_at(object_id: str) -> int:
    """When the object expires, in seconds since the epoch. The id must be valid (`is_id`)."""
    return int(_match(object_id)[2], 16)


def place_of(object_id: str) -> tuple[float, str]:
    """Return what ids are ordered by: when the object was made, and among those of one moment the id itself."""
    return created_at(object_id), object_id


def _match(object_id: str) -> re.Match[str]:
    match = _ID.fullmatch(object_id)
    assert match is not None, "ids are checked where they come in"
    return match
