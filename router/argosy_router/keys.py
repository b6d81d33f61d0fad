"""The API keys clients must present, from the command line, the environment, or a file that may change.

Owns: reading keys. Must not know: requests.
Invariants: keys are kept as digests only (`KeyRing`); a key file that vanishes or empties locks clients out, it never
opens the router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from argosy_engine.protocol.keys import KeyRing

log = logging.getLogger(__name__)

POLL_S = 1.0
_NOBODY = "\0"
"""Cannot be sent in a header: a ring with it alone is closed, not open."""


class ApiKeys:
    """The current keys."""

    def __init__(self, keys: Sequence[str], path: Path | None, poll_s: float = POLL_S) -> None:
        self._fixed = tuple(keys)
        self._path = path
        self._poll_s = poll_s
        self._text: str | None = None
        self.ring = KeyRing(self._fixed)
        if path is not None:
            self._read(path)

    async def watch(self) -> None:
        """Until cancelled."""
        while self._path is not None:
            await asyncio.sleep(self._poll_s)
            self._read(self._path)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            log.error("API key file cannot be read: %s", error)
            text = ""
        if text != self._text:
            self._text = text
            keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
            self.ring = KeyRing([*self._fixed, *keys] or [_NOBODY])
