"""Broadcast queue: one writer sends messages to several reader processes over a ring of shared-memory chunks.

The writer copies a message once, however many readers there are. Waiting is a blocking system call, not a spin loop:
per reader, one eventfd counts the messages to read and one counts the chunks it has freed, both as semaphores. A
message that is larger than a chunk is sent in a memory file of its own, whose descriptor is passed over the reader's
socket.

Memory files and descriptors have no names in the file system, so they vanish with the last process that holds them.
Linux only. Design: vLLM's `shm_broadcast.MessageQueue`, which polls flags in the ring instead.
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
"""How many messages the writer may be ahead of the slowest reader."""
CHUNK_BYTES = 1 << 20
"""Size of a chunk. A step's diff takes kilobytes; only prompts of more than about 200 thousand tokens exceed a chunk.
Its memory is committed when it is first written."""
MAX_MESSAGE_BYTES = 1 << 30

_HEADER = struct.Struct("<IB")
"""Length of the message, and whether it is in a memory file of its own."""


class ReaderEnds(Struct, frozen=True):
    """File descriptors that a reader's process inherits, and the geometry of the ring."""

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
    """Writer's end, which creates the queue; pass `ends[i]` to reader i. Not thread-safe."""

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
        """One socket per reader; its other direction is free for the reader's answers."""
        self._theirs = [theirs for _, theirs in pairs]
        self._next = 0

    @property
    def ends(self) -> list[ReaderEnds]:
        return [
            ReaderEnds(self._ring_fd, messages, space, theirs.fileno(), self._num_chunks, self._chunk_bytes)
            for messages, space, theirs in zip(self._messages, self._space, self._theirs, strict=True)
        ]

    def close_reader_ends(self) -> None:
        """Close our copies of the readers' sockets, so that the end of a reader closes its socket.

        Call it when every reader has inherited its descriptors.
        """
        for theirs in self._theirs:
            theirs.close()

    def put(self, message: bytes) -> None:
        """Send a message to every reader. Blocks while the slowest reader is `num_chunks` messages behind.

        Raises:
            EngineDead: a reader's process has ended.
            ValueError: the message is longer than `MAX_MESSAGE_BYTES`.
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
        for fd in self._space:
            while True:
                try:
                    os.eventfd_read(fd)
                    break
                except BlockingIOError:
                    pass
                # A reader may be slow because it waits for another that has ended.
                ranks = {stream.fileno(): rank for rank, stream in enumerate(self.sockets)}
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                for stream in ranks:
                    poller.register(stream, select.POLLRDHUP)
                for stream, events in poller.poll():
                    if events & (select.POLLRDHUP | select.POLLHUP):
                        raise EngineDead(f"worker {ranks[stream]} ended")

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


def _await_event(fd: int) -> None:
    """Read an eventfd. Unlike most of os, `os.eventfd_read` fails if a signal comes meanwhile, such as SIGUSR1."""
    while True:
        try:
            os.eventfd_read(fd)
        except InterruptedError:
            continue
        return


class BroadcastReader:
    """Reader's end, in the reader's process. Not thread-safe."""

    def __init__(self, ends: ReaderEnds) -> None:
        self._ends = ends
        self._ring = mmap.mmap(ends.ring, ends.num_chunks * ends.chunk_bytes)
        self.socket = socket.socket(fileno=ends.socket)
        self._next = 0

    def get(self) -> bytes:
        """Wait for the next message."""
        _await_event(self._ends.messages)
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


class MessageStream:
    """Length-prefixed messages over a stream socket; carries the readers' answers."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send(self, message: bytes) -> None:
        self._stream.sendall(struct.pack("<I", len(message)) + message)

    def receive(self) -> bytes | None:
        """Wait for the next message. Returns None if the other end has closed."""
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
