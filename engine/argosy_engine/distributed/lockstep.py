"""Lockstep: the engine cores that share experts agree on every step before they launch it. No torch.

A core that has tokens to compute needs the experts of all others, so it calls them: it posts the number of its tokens
on a board in shared memory and rings their bells. Whoever is called joins the same round with its own tokens or, if it
has none, with zero, and then lends its experts. A round is agreed on when all have posted; all launch it then, each
exactly once and in the same order, so that their collectives match.

There is nothing to agree on when all become idle: no round is called, and cores sleep until their bell rings. Requests
may come at any time, since whoever is first calls the next round. (vLLM's cores step in waves instead: idle ones run
empty steps until an all-reduce every 32 steps finds all idle, and a coordinator starts the next wave.)

Board, bells (eventfds) and the file by which the workers find each other have no names in the file system, so they
vanish with the last process that holds them. One machine, Linux only. A rank whose peer ends is not told here: its
client ends it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
from collections.abc import Callable

from msgspec import Struct

from argosy_engine.errors import ConfigError

_WORD_BYTES = 8
_COUNT_BITS, _ROUND_BITS = 30, 32
_IS_DECODE, _IS_AWAKE = 1 << _COUNT_BITS, 1 << (_COUNT_BITS + 1)
_ROUND_MASK = (1 << _ROUND_BITS) - 1
"""A word of the board has the number of tokens, two flags and the round, so that it is written at once."""


class Round(Struct, array_like=True, frozen=True, gc=False):
    """What all ranks have agreed on: one step of each."""

    num_tokens: list[int]
    """Tokens that each data-parallel rank computes."""
    is_decode: bool
    """Whether every request of every rank computes one token, so that all ranks may replay a captured graph."""

    @property
    def num_rows(self) -> int:
        """Rows to which every rank pads its tokens."""
        return max(self.num_tokens)


class LockstepEnds(Struct, frozen=True):
    """File descriptors that the process of a rank's core inherits."""

    rank: int
    rendezvous: int
    """A memory file by which the workers of all ranks find each other."""
    board: int
    bells: list[int]
    """One for each rank."""

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.rendezvous, self.board, *self.bells)


def rendezvous_url(fd: int) -> str:
    """Return the `init_method` of processes that find each other by a memory file, which they have inherited."""
    return f"file:///proc/self/fd/{fd}"


class LockstepFiles:
    """Creates the files of an engine's ranks, in the process that starts them."""

    def __init__(self, size: int) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                "--enable-expert-parallel with --data-parallel-size needs Linux; leave one of them out"
            )
        self._rendezvous = os.memfd_create("argosy-rendezvous", os.MFD_CLOEXEC)
        self._board = os.memfd_create("argosy-lockstep", os.MFD_CLOEXEC)
        os.ftruncate(self._board, size * 2 * _WORD_BYTES)
        self._bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(size)]

    def ends(self, rank: int) -> LockstepEnds:
        return LockstepEnds(rank, self._rendezvous, self._board, self._bells)

    def close(self) -> None:
        """Close our descriptors, once the cores have inherited theirs. May be called twice."""
        fds, self._bells = [self._rendezvous, self._board, *self._bells], []
        self._rendezvous = self._board = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class Lockstep:
    """A rank's view of the rounds. One thread calls all methods but `wake`.

    Args:
        interval_s: longest time between two calls of `on_wait`.
    """

    def __init__(self, ends: LockstepEnds, interval_s: float = 0.5) -> None:
        self.rank, self.size = ends.rank, len(ends.bells)
        self._bells = ends.bells
        self._words = memoryview(mmap.mmap(ends.board, self.size * 2 * _WORD_BYTES)).cast("Q")
        """Two words of each rank, used in turn: a rank that is a round ahead does not overwrite what others read."""
        self._next = 1
        self._interval_s = interval_s
        self._poller = select.poll()
        self._poller.register(self._bells[self.rank], select.POLLIN)
        self.on_wait: Callable[[], None] = lambda: None
        """Called while this rank waits for others longer than a round takes. May raise, which ends the wait."""

    @property
    def is_called(self) -> bool:
        """Whether another rank has begun a round that this one has not joined."""
        return any(self._posted(rank) is not None for rank in range(self.size))

    def join(self, num_tokens: int, *, is_decode: bool = True, is_awake: bool = True) -> Round | None:
        """Join the next round, or begin it, and wait until all ranks have joined it.

        Args:
            num_tokens: that this rank computes; 0 if it only lends its experts.
            is_decode: see `Round`.
            is_awake: whether this rank holds its weights.

        Returns:
            None if a rank is asleep: no rank runs the step.
        """
        assert 0 <= num_tokens < _IS_DECODE
        word = (self._next & _ROUND_MASK) << (64 - _ROUND_BITS)
        word |= num_tokens | (_IS_DECODE if is_decode else 0) | (_IS_AWAKE if is_awake else 0)
        self._words[2 * self.rank + self._next % 2] = word
        for rank, bell in enumerate(self._bells):
            if rank != self.rank:
                _ring(bell)
        while None in (words := [self._posted(rank) for rank in range(self.size)]):
            if not self.wait(self._interval_s):
                self.on_wait()
        self._next += 1
        posted = [each for each in words if each is not None]
        if not all(each & _IS_AWAKE for each in posted):
            return None
        counts = [each & (_IS_DECODE - 1) for each in posted]
        return Round(counts, all(each & _IS_DECODE for each in posted))

    def wait(self, timeout_s: float) -> bool:
        """Wait until the bell has rung since the last call. Returns False after the timeout."""
        if not self._poller.poll(timeout_s * 1000):
            return False
        with contextlib.suppress(BlockingIOError, InterruptedError):
            os.eventfd_read(self._bells[self.rank])
        return True

    def wake(self) -> None:
        """Ring this rank's own bell. Any thread may call it."""
        _ring(self._bells[self.rank])

    def _posted(self, rank: int) -> int | None:
        """Return what a rank has posted for the next round, if it has."""
        word = self._words[2 * rank + self._next % 2]
        return word if word >> (64 - _ROUND_BITS) == self._next & _ROUND_MASK else None


def _ring(bell: int) -> None:
    while True:
        try:
            os.eventfd_write(bell, 1)
        except InterruptedError:
            continue
        except BlockingIOError:  # it has been ringing since it was last heard
            pass
        return
