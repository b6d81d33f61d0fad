"""A bound on the memory of answers to requests of batches, over all batches that a router runs.

Owns: how many bytes each answer holds, and which answers are read from their replicas.
Must not know: HTTP, batches.
Invariants: the answer that has begun first is always read on, so that one is always completed. Half of the memory is
kept for it, and the others share the other half: an account's answers may take three times as much as is free of it
(Choudhury and Hahne, "Dynamic queue length thresholds"), and the first of them as much as is free. So answers that do
not end, because their replica sends little by little, leave memory to those of other accounts. The limit is exceeded by
no more than what of each answer comes at once: up to a megabyte, which the router withholds so that it can try another
replica.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

MAX_HELD_BYTES: Final = 128 * 1024 * 1024
"""Twice the largest answer."""


SHARE_OF_FREE: Final = 3


class AnswerMemory:
    """Counts the bytes of answers that are held, and pauses those that would exceed the limit or their share."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes of all answers."""
        self._answers: dict[HeldAnswer, None] = {}
        """Answers with bytes, in the order in which they began."""
        self._of_account: dict[str, dict[HeldAnswer, None]] = {}
        """Those of each account."""
        self._bytes_of: Counter[str] = Counter()

    @contextlib.contextmanager
    def answer(self, account: str = "") -> Iterator[HeldAnswer]:
        """Hold one answer to a request of `account` inside the block."""
        answer = HeldAnswer(self, account)
        try:
            yield answer
        finally:
            answer.clear()

    def add(self, answer: HeldAnswer, size: int) -> None:
        """Count further bytes of an answer."""
        self._answers.setdefault(answer)
        self._of_account.setdefault(answer.account, {}).setdefault(answer)
        self._bytes_of[answer.account] += size
        self.held += size
        if not self._may_be_read(answer):
            answer.pause()

    def remove(self, answer: HeldAnswer, size: int) -> None:
        """Count an answer's bytes no more."""
        if answer not in self._answers:
            return
        self.held -= size
        del self._answers[answer]
        account = answer.account
        self._bytes_of[account] -= size
        del self._of_account[account][answer]
        if not self._of_account[account]:
            del self._of_account[account], self._bytes_of[account]
        for other in self._answers:
            if self._may_be_read(other):
                other.resume()

    def _may_be_read(self, answer: HeldAnswer) -> bool:
        first = next(iter(self._answers))
        if answer is first:
            return True
        free = MAX_HELD_BYTES // 2 - (self.held - first.size)
        if free < 0:
            return False
        if self._bytes_of[answer.account] <= SHARE_OF_FREE * free:
            return True
        return answer is next(iter(self._of_account[answer.account])) and answer.size <= free


class HeldAnswer:
    """The bytes of one answer, also if it is read again from another attempt."""

    def __init__(self, memory: AnswerMemory, account: str = "") -> None:
        self._memory = memory
        self.account = account
        self.size = 0
        """Bytes that are counted."""
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
        self.size += size
        self._memory.add(self, size)

    def clear(self) -> None:
        """Count none, because they are written or dropped."""
        self.stops_reading()
        size, self.size = self.size, 0
        self._memory.remove(self, size)

    def pause(self) -> None:
        if self._pause is not None and not self._is_paused:
            self._is_paused = self.was_paused = True
            self._pause()

    def resume(self) -> None:
        if self._resume is not None and self._is_paused:
            self._is_paused = False
            self._resume()
