"""The key file: API keys from a file that may change, besides those of the command line and the environment.

Owns: when the file is read again. Must not know: its format, requests.
Invariants: if the key file vanishes or becomes empty, its keys are refused, and the router still requires one; a change
interrupts no request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from argosy_router.auth.key_table import MAX_FILE_BYTES, KeyTable

log = logging.getLogger(__name__)

POLL_S = 1.0


class ApiKeys:
    """Keeps the key table up to date."""

    def __init__(
        self, keys: Sequence[str], path: Path | None, poll_s: float = POLL_S, *, routers: int = 1
    ) -> None:
        """`routers` divide the keys' limits."""
        self._path = path
        self._poll_s = poll_s
        self._content: bytes | None = None
        self._problem = ""
        """Why no key of the file is accepted, as last logged; empty if keys are."""
        self.table = KeyTable(keys, is_closed=path is not None, now=time.monotonic())
        self.table.divide(routers, time.monotonic())
        if path is not None:
            self._read(path)

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(self._poll_s)
            self._read(self._path)

    def _read(self, path: Path) -> None:
        problem = ""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            text = content.decode()
            if not text.strip():
                problem = f"is empty: {path}"
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {error}"
            content, text = b"", ""
        if problem and problem != self._problem:
            log.error("no key of the API key file is accepted: it %s", problem)
        self._problem = problem
        if content != self._content:
            self._content = content
            for problem in self.table.load(text, time.monotonic()):
                log.error("API key file: %s", problem)
