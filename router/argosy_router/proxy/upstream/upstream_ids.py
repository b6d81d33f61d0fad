"""Request ids towards engines.

Owns: ids that no client can choose or guess. Must not know: whose request an id is.
Invariant: an id has 128 random bits and is given out once.

Engines abort, and some deduplicate, by the id in `x-request-id`. So every attempt has an id of its own, a repetition on
the same replica included, and engines never see the client's id.
"""

from __future__ import annotations

import os
from typing import Final

ID_HEX_DIGITS: Final = 32
_IDS_PER_READ: Final = 256
"""Ids made of one read of the kernel's generator, which costs more than everything else here."""


class UpstreamIds:
    """Generates ids."""

    def __init__(self) -> None:
        self._digits = b""
        self._position = 0

    def next(self) -> bytes:
        """Return a new id as lower-case hexadecimal digits."""
        start = self._position
        if start == len(self._digits):
            self._digits = os.urandom(_IDS_PER_READ * ID_HEX_DIGITS // 2).hex().encode()
            start = 0
        self._position = end = start + ID_HEX_DIGITS
        return self._digits[start:end]
