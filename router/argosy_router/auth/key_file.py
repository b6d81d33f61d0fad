"""The key file: API keys from a file that may change, besides those of the command line and the environment.

Owns: when the file is read again. Must not know: its format, requests.
Invariants: if the key file vanishes or becomes empty, its keys are refused, and the router still requires one; a change
interrupts no request, and no look at the file holds up the event loop, however many keys it has. A router that has not
been able to read the file since its start refuses all keys of it, and is not ready.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from argosy_router.auth.key_table import MAX_FILE_BYTES, KeyTable

log = logging.getLogger(__name__)

POLL_S = 1.0
SETTLED_NS = 2_000_000_000
"""A file that was written so long before it was read is not written again without a later time."""


class _Content(NamedTuple):
    """The file as it was read."""

    data: bytes
    text: str
    problem: str
    """Why no key of it is accepted; empty if keys are."""
    is_read: bool = True
    """Whether it could be read."""


class ApiKeys:
    """Keeps the key table up to date."""

    def __init__(
        self, keys: Sequence[str], path: Path | None, poll_s: float = POLL_S, *, routers: int = 1
    ) -> None:
        """`routers` divide the keys' limits."""
        self._path = path
        self._poll_s = poll_s
        self._content: bytes | None = None
        self._seen: tuple[int, int, int, int] | None = None
        """By what the file as it was read is known; None if it may have changed in the same moment."""
        self._problem = ""
        """The last one that was logged."""
        self.table = KeyTable(keys, is_closed=path is not None, now=time.monotonic())
        self.table.divide(routers, time.monotonic())
        if path is not None:
            for _ in self._take(self._read(path)):
                pass

    async def watch(self) -> None:
        """Follow the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(self._poll_s)
            for _ in self._take(await asyncio.to_thread(self._read, self._path)):
                await asyncio.sleep(0)

    def problems_of(self, path: Path) -> list[str]:
        """Take the keys of another file once; return what the router would log of it."""
        content = self._read(path)
        if content is None:
            return []
        if content.problem:
            return [f"no key is accepted: it {content.problem}"]
        return self.table.load(content.text, time.monotonic())

    def _read(self, path: Path) -> _Content | None:
        """Read the file; None if it has not changed. In a thread."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                signature = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
                if signature == self._seen:
                    return None
                is_settled = found.st_mtime_ns + SETTLED_NS < time.time_ns()
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            # A line that is no UTF-8 denies its own key.
            text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        except (OSError, ValueError) as error:
            self._seen = None
            return _Content(b"", "", f"cannot be read: {error}", is_read=False)
        self._seen = signature if is_settled else None
        return _Content(data, text, "" if text.strip() else f"is empty: {path}")

    def _take(self, content: _Content | None) -> Iterator[None]:
        """Accept the keys of the file as it was read, in steps of some milliseconds."""
        if content is None:
            return
        if content.problem and content.problem != self._problem:
            log.error("no key of the API key file is accepted: it %s", content.problem)
        self._problem = content.problem
        if content.data == self._content or (self.table.is_awaited and not content.is_read):
            return
        self._content = content.data
        problems: list[str] = []
        yield from self.table.load_in_steps(content.text, time.monotonic(), problems)
        for problem in problems:
            log.error("API key file: %s", problem)
