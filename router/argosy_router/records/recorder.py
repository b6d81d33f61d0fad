"""Recording the requests of a router as a trace: when they came, how long they were, and what they had in common.

Owns: the file being recorded, its bound, and what of a request goes into it. Must not know: requests' texts, answers.
Invariants: no text is written, and none can be confirmed: chunk hashes are replaced by keyed ones whose key nobody
keeps; the file never grows beyond its bound; while the disk is slow, requests are dropped, not delayed.

The format is `argosy bench router --replay`'s (`replay.trace`). One recording has one key, so equal prefixes have equal
ids within a file and unrelated ones in another.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from argosy_router.records.append_file import AppendFile, flush_until_cancelled
from argosy_router.replay.trace import TraceRequest, encode_request

log = logging.getLogger(__name__)

FLUSH_S = 1.0
MAX_WAITING_CHUNKS = 1_000_000
"""Some 30 MB; a second of a busy router is a hundredth of it."""


class Recorded(NamedTuple):
    """One request that has ended."""

    arrival_s: float
    """Unix time."""
    input_tokens: int
    output_tokens: int
    hashes: Sequence[int]
    """Chain of its chunks."""
    ends: Sequence[int]
    """Prompt tokens up to each chunk's end."""


class Recorder:
    """Writes a trace file while requests end."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises: OSError, when the file cannot be written."""
        self._file = AppendFile(path)
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(32)
        self._waiting: list[Recorded] = []
        self._waiting_chunks = 0
        self._is_full = False
        self.dropped = 0

    def add(self, request: Recorded) -> None:
        """A request has ended."""
        if self._is_full or self._waiting_chunks > MAX_WAITING_CHUNKS:
            self.dropped += 1
            return
        self._waiting.append(request)
        self._waiting_chunks += len(request.hashes) + 1

    async def run(self) -> None:
        """Until cancelled: writes what has ended, then once more."""
        try:
            await flush_until_cancelled(self._flush, FLUSH_S)
        finally:
            self._file.close()

    async def _flush(self) -> None:
        requests, self._waiting, self._waiting_chunks = self._waiting, [], 0
        if requests and not self._is_full:
            await asyncio.to_thread(self._write, requests)

    def _write(self, requests: Sequence[Recorded]) -> None:
        lines = []
        room = self._max_bytes - self._file.size
        for request in requests:
            line = self._line(request)
            room -= len(line)
            if room < 0:
                self._is_full = True
                log.warning("the recording %s is full, later requests are left out", self._file.path)
                break
            lines.append(line)
        try:
            if lines:
                self._file.append(b"".join(lines))
        except OSError as error:
            self.dropped += len(lines)
            log.error("the recording cannot be written: %s", error)

    def _line(self, request: Recorded) -> bytes:
        return encode_request(
            TraceRequest(
                request.arrival_s,
                max(1, request.input_tokens),
                request.output_tokens,
                tuple(self._disguised(value) for value in request.hashes),
                tuple(request.ends),
            )
        )

    def _disguised(self, value: int) -> int:
        digest = hashlib.blake2b(value.to_bytes(8, "little"), digest_size=7, key=self._key).digest()
        return int.from_bytes(digest, "little")
