"""A mounted fleet key, and requests that run while it is rotated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from .harness import Rig, until


class Mount:
    """The mounted Secret of the fleet key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, key: bytes, previous: bytes = b"") -> None:
        (self.path / "previous").unlink(missing_ok=True)
        if previous:
            (self.path / "previous").write_bytes(previous)
        (self.path / "key").write_bytes(key)


class Load:
    """Requests that run all the time, streams and others."""

    def __init__(self, r: Rig, fields: dict[str, Any]) -> None:
        self._rig = r
        self._fields = fields
        self.statuses: list[int] = []
        self.stops = False

    async def send(self, number: int) -> None:
        while not self.stops:
            response = await self._rig.chat(f"hello {number}", stream=bool(number % 2), **self._fields)
            self.statuses.append(response.status_code)

    async def more(self) -> None:
        """Wait until requests have begun and ended since now."""
        enough = len(self.statuses) + 12
        await until(lambda: len(self.statuses) >= enough, 60.0)


@asynccontextmanager
async def load(r: Rig, **fields: Any) -> AsyncIterator[Load]:
    """Requests all the time; `fields` are their fields. Each must be answered."""
    made = Load(r, fields)
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(made.send(number))
        try:
            await made.more()
            yield made
        finally:
            made.stops = True
    assert set(made.statuses) == {200}
