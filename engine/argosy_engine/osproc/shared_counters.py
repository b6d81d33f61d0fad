"""SharedCounters: numbers that the processes of one program keep for each other, in memory that all of them have.

Each process has a row that only it writes, so that no lock is needed; a number is 8 bytes, which processors read and
write as a whole. Whoever reads sums over the rows. The sum of several numbers that change at once may be one of no
moment, so limits on it can be exceeded by what the processes admit within the same microseconds.
"""

from __future__ import annotations

import copy
import mmap
import os
import tempfile

_BYTES = 8


class SharedCounters:
    """The numbers as one process sees them, all 0 at first.

    Args:
        descriptor: of `make_shared_memory`; not kept, and not closed.
        num_processes: number of rows.
        index: row of this process.
        num_columns: numbers of each process.
    """

    def __init__(self, descriptor: int, num_processes: int, index: int, num_columns: int) -> None:
        memory = mmap.mmap(descriptor, num_processes * num_columns * _BYTES)
        self._numbers = memoryview(memory).cast("q")
        self._own = index * num_columns
        self._others = [row * num_columns for row in range(num_processes) if row != index]

    def after(self, num_columns: int) -> SharedCounters:
        """Return the same numbers without the first columns, for another owner."""
        part = copy.copy(self)
        part._own = self._own + num_columns
        part._others = [start + num_columns for start in self._others]
        return part

    def set(self, column: int, value: int) -> None:
        """Publish a number of this process."""
        self._numbers[self._own + column] = value

    def others(self, column: int) -> int:
        """Return the sum of a number over the other processes."""
        return sum(self._numbers[row + column] for row in self._others)


def make_shared_memory(num_processes: int, num_columns: int) -> int:
    """Return the descriptor of a memory without a name, which processes that inherit it share. The caller closes it."""
    size = num_processes * num_columns * _BYTES
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("argosy-counters")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
