"""Discovery from a fleet document on disk, which its writer replaces atomically (local fleet).

Owns: noticing changes. Must not know: who writes the file.

Polls the file with `stat` a few times a second instead of using inotify: a `stat` costs a microsecond, works on every
file system, and follows renames, which is how the writer replaces the file.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from argosy_protocol.fleet import decode_fleet
from argosy_router.discovery.source import Publish, snapshot_of

log = logging.getLogger(__name__)

POLL_S = 0.25

Stamp = tuple[int, int, int]


class FileDiscovery:
    """Follows one fleet document on disk."""

    def __init__(self, path: Path, poll_s: float = POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s

    async def run(self, publish: Publish) -> None:
        """Publish changes until cancelled. A missing or broken file leaves the last good document in force."""
        seen: Stamp | None = None
        while True:
            stamp = self._stamp()
            if stamp is not None and stamp != seen:
                seen = stamp
                self._read(publish)
            await asyncio.sleep(self._poll_s)

    def _stamp(self) -> Stamp | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self, publish: Publish) -> None:
        try:
            data = self._path.read_bytes()
            document = decode_fleet(data)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("fleet file %s is not usable, keeping the last one: %s", self._path, error)
            return
        publish(snapshot_of(document, data))
