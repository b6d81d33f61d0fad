"""Lines of results: kept in parts as they come, merged into the files of results at the end.

Owns: the parts of one batch. Must not know: how requests are sent, what a lease is.
Invariants: a part is written once, under a name with its writer's term, so that processes never overwrite each other's;
of several results of one request, the first in the order of parts counts, and each request has at most one line in the
two files together.

    work/BATCH_ID/TERM-NUMBER.jsonl     one `_Result` per line
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec import Raw, Struct

from argosy_batch.input_lines import split_lines
from argosy_batch.router_client import MAX_ANSWER_BYTES
from argosy_batch.storage.blob_store import BlobStore

log = logging.getLogger(__name__)

FLUSH_BYTES: Final = 1024 * 1024
_MAX_LINE_BYTES: Final = 2 * MAX_ANSWER_BYTES

Tokens = tuple[int, int, int, int]
"""Input, of these cached, output, of these reasoning."""


class _Result(Struct, frozen=True, array_like=True):
    """One request's result."""

    index: int
    """The request's place among all of the batch, from 0."""
    is_error: bool
    tokens: Tokens
    line: Raw
    """Its line in a file of results."""


_decoder: Final = msgspec.json.Decoder(_Result)


class BatchResults:
    """The results of one batch, as far as the process that runs it knows them."""

    def __init__(self, blobs: BlobStore, batch_id: str, term: int, total: int) -> None:
        """`term` is that of the router's lease."""
        self._blobs = blobs
        self._folder = f"work/{batch_id}"
        self._term = term
        self.total = total
        self._done = bytearray(total)
        self._parts: list[str] = []
        self._held: list[bytes] = []
        """Results that are in no part yet."""
        self._held_bytes = 0
        self._num_attempts = 0
        self._flushing = asyncio.Lock()
        self.num_bytes = 0
        """Of the lines of all results."""
        self.num_completed = 0
        self.num_failed = 0
        self.tokens: Tokens = (0, 0, 0, 0)

    @property
    def num_done(self) -> int:
        """Requests that have a result."""
        return self.num_completed + self.num_failed

    @property
    def is_large(self) -> bool:
        """Whether what is held should be flushed soon."""
        return self._held_bytes >= FLUSH_BYTES

    def is_done(self, index: int) -> bool:
        return bool(self._done[index])

    async def load(self) -> None:
        """Read what processes before have written."""
        self._parts = [entry.key for entry in await self._blobs.entries(self._folder)]
        async with aclosing(self._results()) as results:
            async for result in results:
                self._count(result)

    def add(self, index: int, line: bytes, tokens: Tokens, *, is_error: bool) -> None:
        """Take a result; `line` is JSON without line breaks."""
        result = _Result(index, is_error, tokens, Raw(line))
        if self.is_done(index):
            return
        self._count(result)
        encoded = msgspec.json.encode(result) + b"\n"
        self._held.append(encoded)
        self._held_bytes += len(encoded)

    async def flush(self) -> None:
        """Write what is held. If the storage fails, it is still held."""
        async with self._flushing:
            if not self._held:
                return
            number = len(self._held)
            data = b"".join(self._held)
            self._num_attempts += 1  # a failed one may have been written all the same
            key = f"{self._folder}/{self._term:012d}-{self._num_attempts:012d}.jsonl"
            await self._blobs.create(key, data)
            self._parts.append(key)
            del self._held[:number]
            self._held_bytes -= len(data)

    async def lines(self, *, of_errors: bool) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the file of results, or of errors. Flush first."""
        async with aclosing(self._results()) as results:
            async for result in results:
                if result.is_error is of_errors:
                    yield bytes(result.line) + b"\n"

    async def remove(self) -> None:
        """Remove all parts, because the files are written."""
        for entry in await self._blobs.entries(self._folder):
            await self._blobs.delete(entry.key)

    async def _results(self) -> AsyncGenerator[_Result, None]:
        """Yield each request's first result."""
        seen = bytearray(len(self._done))
        for part in list(self._parts):
            chunks = self._blobs.read(part)
            async with aclosing(chunks), aclosing(split_lines(chunks, _MAX_LINE_BYTES)) as lines:
                async for _, line in lines:
                    if line is None:  # longer than an answer can be
                        continue
                    try:
                        result = _decoder.decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        log.error("storage: a line of %s cannot be read; its request is sent again", part)
                        continue
                    if result.index < len(seen) and not seen[result.index]:
                        seen[result.index] = 1
                        yield result

    def _count(self, result: _Result) -> None:
        self._done[result.index] = 1
        self.num_bytes += len(result.line)
        self.num_failed += result.is_error
        self.num_completed += not result.is_error
        mine, more = self.tokens, result.tokens
        self.tokens = (mine[0] + more[0], mine[1] + more[1], mine[2] + more[2], mine[3] + more[3])
