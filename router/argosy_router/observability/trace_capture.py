"""Captures a router's requests as a trace: their arrival times, lengths and shared prefixes.

Owns: the file being recorded, its size bound, and which data of a request go into it. Must not know: texts of requests
and answers.
Invariants: no text is written, and the file cannot serve to confirm a guessed text, because chunk hashes are replaced
by keyed hashes whose key is never stored; the file never exceeds its bound; while the disk is slow, requests are left
out of the recording rather than delayed.

The format is that of `argosy bench router --replay` (`simulation.trace`). One capture has one key, so equal prefixes
have equal ids within a recording and unrelated ids in another.
"""

# Not compiled: runs only while requests are recorded.

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from argosy_router.observability.append_file import AppendFile, flush_until_cancelled
from argosy_router.simulation.trace import TraceRequest, encode_request

log = logging.getLogger(__name__)

FLUSH_S = 1.0
MAX_WAITING_CHUNKS = 1_000_000
"""Some 30 MB; a busy router adds a hundredth of it per second."""


class CapturedRequest(NamedTuple):
    """One request that has ended."""

    arrival_s: float
    """Unix time."""
    input_tokens: int
    output_tokens: int
    hashes: Sequence[int]
    """Chain of its chunk hashes."""
    ends: Sequence[int]
    """Prompt tokens up to the end of each chunk."""


class TraceCapture:
    """Writes requests to a trace file as they end."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """
        Raises:
            OSError: the file cannot be opened or written.
        """
        self._file = AppendFile(path)
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(32)
        self._waiting: list[CapturedRequest] = []
        self._waiting_chunks = 0
        self._is_full = False
        self.dropped = 0

    def add(self, request: CapturedRequest) -> None:
        """Queue a request that has ended."""
        if self._is_full or self._waiting_chunks > MAX_WAITING_CHUNKS:
            self.dropped += 1
            return
        self._waiting.append(request)
        self._waiting_chunks += len(request.hashes) + 1

    async def run(self) -> None:
        """Write queued requests periodically until cancelled, then once more."""
        try:
            await flush_until_cancelled(self.flush, FLUSH_S)
        finally:
            self._file.close()

    async def flush(self) -> None:
        """Write the queued requests."""
        requests, self._waiting, self._waiting_chunks = self._waiting, [], 0
        if requests and not self._is_full:
            await asyncio.to_thread(self._write, requests)

    def _write(self, requests: Sequence[CapturedRequest]) -> None:
        lines = []
        free = self._max_bytes - self._file.size
        for request in requests:
            line = self._line(request)
            free -= len(line)
            if free < 0:
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

    def _line(self, request: CapturedRequest) -> bytes:
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
