"""Lines that a router writes: to a descriptor whose reader may be slow or gone, such as standard error, to append-only
files, and the traces of its requests (arrival times, lengths and shared prefixes), which may be read again.

Owns: the threads and files that are written, the format of traces, the size bound of a recording, and which data of a
request go into it. Must not know: texts of requests and answers, what other lines contain.
Invariants: `LineWriter.write` neither blocks nor raises on a slow or closed reader; its buffer is bounded, and lines
that do not fit are dropped whole. A trace has no text, and cannot serve to confirm a guessed text, because chunk hashes
are replaced by keyed hashes whose key is never stored; a recording never exceeds its bound; while the disk is slow,
requests are left out of it rather than delayed.

The format of traces is Mooncake's (one JSON object per line): `timestamp` in milliseconds, `input_length`,
`output_length`, and `hash_ids`, where equal ids mean equal blocks with equal prefixes. A block covers `block_tokens`
tokens, unless the line gives the end of each in `token_ends`, as the router's own recordings do. One capture has one
key, so equal prefixes have equal ids within a recording and unrelated ids in another.
"""

# Not compiled: waits for pipes and the disk, in threads.

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

MOONCAKE_BLOCK_TOKENS = 512
MAX_TOKENS = 1 << 24


class TraceError(Exception):
    """The file is not a trace; the message names the line."""


class TraceRequest(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks; each stands for the whole prompt up to its end."""
    ends: tuple[int, ...]
    """Prompt tokens up to the end of each block."""


class _Line(Struct, omit_defaults=True):
    timestamp: Annotated[float, Meta(ge=0.0)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: Annotated[list[int], Meta(max_length=1 << 20)] = []
    token_ends: list[int] | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_trace(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[TraceRequest]:
    """Read a trace file; the requests are ordered by arrival, the first at time zero.

    Raises:
        TraceError: the file cannot be read, or a line is not a request.
    """
    requests = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_request(line, block_tokens, f"{path}:{number}"))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if not requests:
        raise TraceError(f"{path} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    return [request._replace(arrival_s=request.arrival_s - start) for request in requests]


def _request(line: bytes, block_tokens: int, where: str) -> TraceRequest:
    try:
        entry = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: {error}") from None
    count = len(entry.hash_ids)
    ends = entry.token_ends
    if ends is None:
        ends = [min(entry.input_length, block_tokens * (number + 1)) for number in range(count)]
    elif len(ends) != count or ends != sorted(ends) or (ends and not 0 <= ends[0] <= ends[-1] <= MAX_TOKENS):
        raise TraceError(f"{where}: token_ends must rise and have one entry per hash_id")
    return TraceRequest(
        entry.timestamp / 1000.0, entry.input_length, entry.output_length, tuple(entry.hash_ids), tuple(ends)
    )


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace file, with `token_ends`."""
    with path.open("wb") as file:
        for request in requests:
            file.write(encode_request(request))


def encode_request(request: TraceRequest) -> bytes:
    """Encode one request as a line, with its line end."""
    line = _Line(
        request.arrival_s * 1000.0,
        request.input_tokens,
        request.output_tokens,
        list(request.blocks),
        list(request.ends),
    )
    return msgspec.json.encode(line) + b"\n"


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


MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Some 20,000 access lines; reached only when the reader has stopped."""
LAST_LINES_S = 1.0
"""How long `close` waits for the reader."""


class LineWriter:
    """Writes to `descriptor`, one line or block of lines after another."""

    def __init__(self, descriptor: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._descriptor = descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, lines: bytes) -> bool:
        """Queue whole lines to be written. Returns False if the buffer is full and the lines were dropped."""
        with self._lock:
            if self._waiting_bytes + len(lines) > self._max_waiting_bytes:
                return False
            self._waiting_bytes += len(lines)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="line writer", daemon=True)
                self._thread.start()
        self._queue.put(lines)
        return True

    def close(self, timeout_s: float = LAST_LINES_S) -> None:
        """Wait until everything is written, at most `timeout_s`. A later `write` starts a new thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout_s)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            rest = memoryview(lines)
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                pass  # the other end is closed, so the error cannot be reported either
            with self._lock:
                self._waiting_bytes -= len(lines)


class LineHandler(logging.Handler):
    """Logging handler that writes through a `LineWriter`, so that a log call cannot block the event loop."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)


_TAIL_BYTES = 1 << 20
"""A torn line is searched for in this many bytes at the end; lines take a few kilobytes."""


class AppendFile:
    """Append-only file of whole lines, whose methods block: call them in a thread. Opens `path`, and truncates a line
    that a crash left unfinished.

    Readers of the file see no partial line once `append` has returned or raised, nor after a crash once the file has
    been opened again; only one process writes a file at a time.

    Raises:
        BlockingIOError: another process is writing this file.
        OSError: it cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.size = self._repaired_size()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _repaired_size(self) -> int:
        size = os.fstat(self._descriptor).st_size
        tail = os.pread(self._descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        torn = len(tail) - (tail.rfind(b"\n") + 1)
        if torn:
            os.ftruncate(self._descriptor, size - torn)
        return size - torn

    def append(self, lines: bytes) -> None:
        """Write whole lines and sync them to disk, or none of them.

        Raises:
            OSError: nothing was added; the same lines may be appended again.
        """
        assert lines.endswith(b"\n")
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._descriptor, lines[written:])
            os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise
        self.size += written

    def close(self) -> None:
        os.close(self._descriptor)


async def flush_until_cancelled(flush: Callable[[], Awaitable[None]], period_s: float) -> None:
    """Call `flush` periodically until cancelled, then once more. Calls never overlap, and none is interrupted."""
    flushing: asyncio.Future[None] | None = None
    try:
        while True:
            await asyncio.sleep(period_s)
            flushing = asyncio.ensure_future(flush())
            await asyncio.shield(flushing)
    finally:
        if flushing is not None:
            await flushing
        await flush()
