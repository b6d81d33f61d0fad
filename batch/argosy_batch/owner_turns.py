"""Places for work that takes much memory, which owners take in turn.

Owns: how many there are, and who waits. Must not know: what the work is.
Invariant: an owner has one place at a time, and those that wait get theirs in the order in which they came: one with a
thousand requests delays another one by a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class _Line:
    """The requests of one owner."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_requests = 0


class OwnerTurns:
    """The places of one process."""

    def __init__(self, size: int) -> None:
        self._places = asyncio.Semaphore(size)
        self._lines: dict[str, _Line] = {}
        """Of owners that have a place or wait for one."""

    @property
    def num_owners(self) -> int:
        """Owners that have a place or wait for one."""
        return len(self._lines)

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside the block."""
        line = self._lines.setdefault(owner, _Line())
        line.num_requests += 1
        try:
            async with line.lock, self._places:
                yield
        finally:
            line.num_requests -= 1
            if not line.num_requests:
                del self._lines[owner]
