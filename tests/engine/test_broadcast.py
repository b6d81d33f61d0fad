"""The broadcast queue between real processes: order, wrap-around, large messages, slow and dead readers."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy_engine.errors import EngineDead
from argosy_engine.executor.broadcast import BroadcastReader, BroadcastWriter, MessageStream, ReaderEnds
from processes import held_files, wait_until

READER = """
import hashlib, signal, sys
from argosy_engine.executor.broadcast import BroadcastReader, MessageStream, ReaderEnds
reader = BroadcastReader(ReaderEnds(*map(int, sys.argv[1:])))
answers = MessageStream(reader.socket)
signal.signal(signal.SIGUSR1, lambda *_: answers.send(b"signalled"))
answers.send(b"up")
while True:
    message = reader.get()
    answers.send(hashlib.sha256(message).digest())
    if message == b"stop":
        break
"""


class Readers:
    """`count` processes that answer each message with its digest."""

    def __init__(self, count: int, **geometry: int) -> None:
        self.writer = BroadcastWriter(count, **geometry)
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    READER,
                    *map(str, (*ends.fds, ends.num_chunks, ends.chunk_bytes)),
                ],
                pass_fds=ends.fds,
            )
            for ends in self.writer.ends
        ]
        self.writer.close_reader_ends()
        self.answers = [MessageStream(stream) for stream in self.writer.sockets]
        assert [answer.receive() for answer in self.answers] == [b"up"] * count

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.writer.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Readers]:
    readers = Readers(3, num_chunks=4, chunk_bytes=4096)
    yield readers
    readers.close()


def test_every_reader_gets_every_message_in_order(three: Readers) -> None:
    sizes = [0, 1, 4091, 4092, 5, 100_000, 3, 1 << 21, 2, *range(0, 5000, 250)]
    messages = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    writer = threading.Thread(target=lambda: [three.writer.put(message) for message in messages])
    writer.start()
    expected = [hashlib.sha256(message).digest() for message in messages]
    for answers in three.answers:
        assert [answers.receive() for _ in messages] == expected
    writer.join()


def test_a_signal_does_not_end_a_reader_that_waits(three: Readers) -> None:
    process, answers = three.processes[0], three.answers[0]
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "the reader to wait")
    process.send_signal(signal.SIGUSR1)
    assert answers.receive() == b"signalled"
    three.writer.put(b"message")
    for each in three.answers:
        assert each.receive() == hashlib.sha256(b"message").digest()


def test_the_writer_waits_for_the_slowest_reader() -> None:
    """Readers in this process, so that each step is ours to take."""
    writer = BroadcastWriter(2, num_chunks=2, chunk_bytes=64)
    fast, slow = (
        BroadcastReader(ReaderEnds(*map(os.dup, ends.fds), ends.num_chunks, ends.chunk_bytes))
        for ends in writer.ends
    )
    done = threading.Event()

    def write() -> None:
        for index in range(3):
            writer.put(b"message %d" % index)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert fast.get() == b"message 0"
    assert fast.get() == b"message 1"
    assert not done.wait(0.05)  # the ring is full: `slow` has read nothing
    assert slow.get() == b"message 0"
    assert done.wait(20)
    assert [slow.get(), slow.get(), fast.get()] == [b"message 1", b"message 2", b"message 2"]
    thread.join()
    for reader in (fast, slow):
        reader.close()
    writer.close()


def test_a_killed_reader_is_an_error_not_a_hang() -> None:
    readers = Readers(2, num_chunks=2, chunk_bytes=64)
    try:
        readers.processes[1].kill()
        messages = [b"message"] * 4
        with pytest.raises(EngineDead, match="worker 1 ended"):
            list(map(readers.writer.put, messages))
        assert readers.answers[1].receive() is None
        with pytest.raises(EngineDead):
            readers.writer.put(b"x" * 1000)
    finally:
        readers.close()


def test_the_queue_has_no_name_in_any_file_system() -> None:
    before = held_files(os.getpid())
    writer = BroadcastWriter(1)
    writer.put(b"message")
    assert held_files(os.getpid()) <= before
    writer.close()
