"""BroadcastQueue: one writer, many reader processes, messages in a ring of shared-memory chunks.

A message is copied once however many readers there are. Nobody spins: per reader, one eventfd counts messages to read
and one counts chunks it has freed, both as semaphores, so a wait is a blocking system call. A message that is larger
than a chunk travels in a memory file of its own, whose descriptor is passed over the reader's socket.

Nothing here has a name: memory files and descriptors vanish with the last process that holds them. Linux only.
(vLLM's `shm_broadcast.MessageQueue`, which polls flags in the ring.)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import sys

from msgspec import Struct

from argosy_engine.errors import ConfigError, EngineDead

NUM_CHUNKS = 8
"""Messages that the writer may be ahead of the slowest reader."""
CHUNK_BYTES = 1 << 20
"""A step's diff has kilobytes; only prompts beyond some 200 thousand tokens exceed this. Committed when written."""
MAX_MESSAGE_BYTES = 1 << 30

_HEADER = struct.Struct("<IB")
"""length, whether the message is in a file of its own"""


class ReaderEnds(Struct, frozen=True):
    """Descriptors that a reader's process inherits, and the ring's geometry."""

    ring: int
    messages: int
    space: int
    socket: int
    num_chunks: int
    chunk_bytes: int

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.ring, self.messages, self.space, self.socket)


class BroadcastWriter:
    """Creates the queue; `ends[i]` goes to reader i. Used by one thread."""

    def __init__(
        self, num_readers: int, *, num_chunks: int = NUM_CHUNKS, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                "several processes per engine need Linux; use --distributed-executor-backend uni"
            )
        self._num_chunks, self._chunk_bytes = num_chunks, chunk_bytes
        self._ring_fd = os.memfd_create("argosy-broadcast", os.MFD_CLOEXEC)
        os.ftruncate(self._ring_fd, num_chunks * chunk_bytes)
        self._ring = mmap.mmap(self._ring_fd, num_chunks * chunk_bytes)
        flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        self._messages = [os.eventfd(0, flags) for _ in range(num_readers)]
        self._space = [os.eventfd(num_chunks, flags | os.EFD_NONBLOCK) for _ in range(num_readers)]
        pairs = [socket.socketpair() for _ in range(num_readers)]
        self.sockets = [ours for ours, _ in pairs]
        """One per reader; the other direction is free for its answers."""
        self._theirs = [theirs for _, theirs in pairs]
        self._next = 0

    @property
    def ends(self) -> list[ReaderEnds]:
        return [
            ReaderEnds(self._ring_fd, messages, space, theirs.fileno(), self._num_chunks, self._chunk_bytes)
            for messages, space, theirs in zip(self._messages, self._space, self._theirs, strict=True)
        ]

    def close_reader_ends(self) -> None:
        """Call it when every reader has its descriptors: from then on the end of a reader is seen on its socket."""
        for theirs in self._theirs:
            theirs.close()

    def put(self, message: bytes) -> None:
        """Hands the message to every reader; blocks while the slowest is `num_chunks` behind.

        Raises:
            EngineDead: a reader's process has ended.
        """
        size = len(message)
        is_large = size > self._chunk_bytes - _HEADER.size
        self._await_space()
        start = self._next * self._chunk_bytes
        self._next = (self._next + 1) % self._num_chunks
        _HEADER.pack_into(self._ring, start, size, is_large)
        if is_large:
            self._send_file(message)
        else:
            start += _HEADER.size
            self._ring[start : start + size] = message
        for fd in self._messages:
            os.eventfd_write(fd, 1)

    def _await_space(self) -> None:
        for rank, fd in enumerate(self._space):
            while True:
                try:
                    os.eventfd_read(fd)
                    break
                except BlockingIOError:
                    pass
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                poller.register(self.sockets[rank].fileno(), select.POLLRDHUP)
                if any(events & (select.POLLRDHUP | select.POLLHUP) for _, events in poller.poll()):
                    raise EngineDead(f"worker {rank} ended")

    def _send_file(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")
        fd = os.memfd_create("argosy-message", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(message)
            for rank, ours in enumerate(self.sockets):
                try:
                    socket.send_fds(ours, [b"F"], [fd])
                except OSError as error:
                    raise EngineDead(f"worker {rank} ended ({error})") from None
        finally:
            os.close(fd)

    def close(self) -> None:
        self.close_reader_ends()
        for ours in self.sockets:
            ours.close()
        for fd in (*self._messages, *self._space, self._ring_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._ring.close()


class BroadcastReader:
    """A reader's end, in its own process; used by one thread."""

    def __init__(self, ends: ReaderEnds) -> None:
        self._ends = ends
        self._ring = mmap.mmap(ends.ring, ends.num_chunks * ends.chunk_bytes)
        self.socket = socket.socket(fileno=ends.socket)
        self._next = 0

    def get(self) -> bytes:
        """The next message; blocks for it."""
        os.eventfd_read(self._ends.messages)
        start = self._next * self._ends.chunk_bytes
        self._next = (self._next + 1) % self._ends.num_chunks
        size, is_large = _HEADER.unpack_from(self._ring, start)
        if is_large:
            message = self._receive_file(size)
        else:
            start += _HEADER.size
            message = self._ring[start : start + size]
        os.eventfd_write(self._ends.space, 1)
        return message

    def _receive_file(self, size: int) -> bytes:
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 1)
        with os.fdopen(fds[0], "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as content:
            return content[:]

    def close(self) -> None:
        self._ring.close()
        self.socket.close()
        for fd in (self._ends.messages, self._ends.space, self._ends.ring):
            os.close(fd)


class Framed:
    """Length-prefixed messages over a stream socket: a reader's answers."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send(self, message: bytes) -> None:
        self._stream.sendall(struct.pack("<I", len(message)) + message)

    def receive(self) -> bytes | None:
        """The next message, or None when the other end is gone."""
        head = self._exactly(4)
        return None if head is None else self._exactly(struct.unpack("<I", head)[0])

    def _exactly(self, size: int) -> bytes | None:
        parts: list[bytes] = []
        while size:
            try:
                part = self._stream.recv(min(size, 1 << 20))
            except ConnectionError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
