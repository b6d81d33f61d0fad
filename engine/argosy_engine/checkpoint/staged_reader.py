"""StagedReader: threads that read pieces of files into a few buffers, ahead of the one that takes them.

Pieces are taken in the order in which they were given, and read in that order, by several threads at once, because one
read at a time leaves a disk or a network file system idle. A buffer is read into again after its owner has given it
back and the copy from it has ended, so that memory is bounded by the buffers, whatever the sizes of the files.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class CopyEvent(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Piece(NamedTuple):
    """Bytes of a file."""

    fd: int
    place: range
    """Offsets in the file, at most as many as a buffer has bytes."""


class ShortRead(Exception):
    """A file ends before a piece."""


class StagedReader:
    """Reads pieces while it is entered.

    Args:
        pieces: in the order in which they will be taken.
        buffers: host memory, uint8; a device can copy from it while the host goes on.
        num_threads: reads at a time.
    """

    def __init__(self, pieces: Sequence[Piece], buffers: Sequence[torch.Tensor], num_threads: int) -> None:
        self._pieces = pieces
        self._changed = threading.Condition()
        self._free: deque[tuple[torch.Tensor, CopyEvent | None]] = deque((each, None) for each in buffers)
        self._read: dict[int, torch.Tensor | Exception] = {}
        self._num_started = self._num_taken = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"weight reader {index}", daemon=True)
            for index in range(min(num_threads, len(pieces)))
        ]

    def __enter__(self) -> StagedReader:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def take(self) -> torch.Tensor:
        """Wait for the next piece and return the buffer that begins with it; pass it to `give_back` after use.

        Raises:
            ShortRead: the file ends before the piece.
            OSError: it could not be read.
        """
        index = self._num_taken
        self._num_taken += 1
        with self._changed:
            self._changed.wait_for(lambda: index in self._read)
            read = self._read.pop(index)
        if isinstance(read, Exception):
            raise read
        return read

    def give_back(self, buffer: torch.Tensor, copied: CopyEvent | None) -> None:
        """Let a buffer be read into once the copy from it has ended.

        Args:
            copied: end of that copy; None: it was not copied from.
        """
        with self._changed:
            self._free.append((buffer, copied))
            self._changed.notify_all()

    def _end(self) -> None:
        """End the threads that have started. None reads from a file afterwards, so that the files can be closed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._is_closed or self._num_started == len(self._pieces):
                    return
                # The buffer comes first: whoever has a piece can read it, and the earliest piece is never left over.
                buffer, copied = self._free.popleft()
                index = self._num_started
                self._num_started += 1
            read: torch.Tensor | Exception = buffer
            try:
                if copied is not None:
                    copied.synchronize()
                _fill(buffer, self._pieces[index])
            except Exception as error:
                read = error
            with self._changed:
                self._read[index] = read
                self._changed.notify_all()

    def _has_news(self) -> bool:
        return self._is_closed or self._num_started == len(self._pieces) or bool(self._free)


def _fill(buffer: torch.Tensor, piece: Piece) -> None:
    view = buffer.numpy().data[: len(piece.place)]
    done = 0
    while done < len(view):
        count = os.preadv(piece.fd, [view[done:]], piece.place.start + done)
        if not count:
            raise ShortRead
        done += count
