"""A bound on the memory of answers to requests of batches, over all batches that a router runs.

Owns: how many bytes each answer holds, and which answers are read from their replicas.
Must not know: HTTP, batches.
Invariant: beyond the limit only the answer that has begun first is read on, so that one is always completed. The memory
exceeds the limit by no more than one answer, and what of each of the others comes at once: up to a megabyte, which the
router withholds so that it can try another replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

MAX_HELD_BYTES: Final = 128 * 1024 * 1024
"""Twice the largest answer."""


class AnswerMemory:
    """Counts the bytes of answers that are held, and pauses those that would exceed the limit."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes of all answers."""
        self._answers: dict[HeldAnswer, None] = {}
        """Answers with bytes, in the order in which they began."""

    @contextlib.contextmanager
    def answer(self) -> Iterator[HeldAnswer]:
        """Hold one answer inside the block."""
        answer = HeldAnswer(self)
        try:
            yield answer
        finally:
            answer.clear()

    def add(self, answer: HeldAnswer, size: int) -> None:
        """Count further bytes of an answer."""
        self._answers.setdefault(answer)
        self.held += size
        if self.held > MAX_HELD_BYTES and answer is not next(iter(self._answers)):
            answer.pause()

    def remove(self, answer: HeldAnswer, size: int) -> None:
        """Count an answer's bytes no more."""
        self.held -= size
        self._answers.pop(answer, None)
        if self.held <= MAX_HELD_BYTES:
            for other in self._answers:
                other.resume()
        elif self._answers:
            next(iter(self._answers)).resume()


class HeldAnswer:
    """The bytes of one answer, also if it is read again from another attempt."""

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._size = 0
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None
        self._is_paused = False
        self.was_paused = False
        """Whether the attempt that is read, or was read last, has been paused."""

    def reads(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Take what pauses and resumes the reading, until `stops_reading`."""
        self._pause, self._resume = pause, resume
        self.was_paused = False

    def stops_reading(self) -> None:
        """Note that the answer is complete, or its attempt over."""
        self._pause = self._resume = None
        self._is_paused = False

    def add(self, size: int) -> None:
        """Count further bytes."""
        self._size += size
        self._memory.add(self, size)

    def clear(self) -> None:
        """Count none, because they are written or dropped."""
        self.stops_reading()
        size, self._size = self._size, 0
        self._memory.remove(self, size)

    def pause(self) -> None:
        if self._pause is not None and not self._is_paused:
            self._is_paused = self.was_paused = True
            self._pause()

    def resume(self) -> None:
        if self._resume is not None and self._is_paused:
            self._is_paused = False
            self._resume()
