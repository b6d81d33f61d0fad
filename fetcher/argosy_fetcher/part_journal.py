"""Part journal: which parts of a partially fetched file are on disk.

A part is noted after its last byte was written, with one append, so the journal tells the truth however the process
ends. A crash of the machine may lose bytes that the journal counts: content with a digest is checked in the end, and
parts of a file without one count only within the same boot.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Final

import msgspec

_MAX_HEADER_BYTES: Final = 512
_MAX_LINE_BYTES: Final = 12
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class JournalHeader(msgspec.Struct, frozen=True):
    """First line. A journal with another header says nothing about this file."""

    size: int
    part_bytes: int
    boot: str
    """Id of the machine's boot in which the parts were written; empty if that does not matter."""


def boot_id() -> str | None:
    """Return what identifies the time since the machine started, or None where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()[:64] or None
    except OSError:
        return None


class PartJournal:
    """The journal of one file.

    Args:
        has_digest: whether the file's content will be checked.
    """

    def __init__(self, path: Path, *, size: int, part_bytes: int, has_digest: bool) -> None:
        boot = "" if has_digest else boot_id()
        self._path = path
        self._num_parts = -(-size // part_bytes)
        self._is_lasting = boot is not None
        self._lock = threading.Lock()
        self._header = JournalHeader(size, part_bytes, boot or "")

    def load(self) -> set[int]:
        """Return the finished parts; empty if there is no journal, or none of this file."""
        if not self._is_lasting:
            return set()
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_HEADER_BYTES + _MAX_LINE_BYTES * (2 * self._num_parts + 1))
        except FileNotFoundError:
            return set()
        try:
            header, *lines, torn = text.split(b"\n")
            if msgspec.json.decode(header, type=JournalHeader) != self._header:
                return set()
            parts = {int(line) for line in lines}
        except (msgspec.MsgspecError, ValueError):
            return set()
        if not all(0 <= part < self._num_parts for part in parts):
            return set()
        if torn:  # the next line must not continue it
            os.truncate(self._path, len(text) - len(torn))
        return parts

    def start(self) -> None:
        """Begin an empty journal."""
        self._path.write_bytes(msgspec.json.encode(self._header) + b"\n")

    def add(self, part: int) -> None:
        """Note a part whose bytes were written. Called by several threads.

        Raises:
            OSError: the disk is full or fails. The journal is then as it was.
        """
        line = b"%d\n" % part
        with self._lock, self._path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            if file.write(line) < len(line):
                file.truncate(start)  # or the next line would continue this one, and be another number
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)
