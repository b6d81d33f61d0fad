"""One replica's part of the prefix index: what it announced, and what we expect it to hold.

Owns: the replica's slots, guesses awaiting confirmation, the history of what it was sent.
Must not know: frames, sockets, other replicas.
Invariants: a guess about a replica that announces is confirmed or erased after `MAX_GUESS_TTL_S` at the latest, and all
replicas' guesses together stay within the index's `max_guesses`; what a replica that does not announce was sent is
believed for one to two periods of `HISTORY_S` after its last use.

History has a slot of its own for each period: to forget a period is to retire its slot, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from argosy_router.prefixes.index import PrefixIndex

GUESS_TTL_S = 10.0
"""A prompt's chunks are announced once they are computed: at least twice a bad time to first token. Too long sends
followers to a replica that never got the prefix; too short scatters a burst."""
TTFT_FACTOR = 2.0
"""A guess about a prompt behind a long queue lives this many times as long as the first token is expected to take."""
MAX_GUESS_TTL_S = 300.0
"""Whoever waits longer has given up, or its replica has."""
HISTORY_S = 300.0
"""A conversation's next turn comes within minutes; a busy cache has turned over by then."""


class Residency:
    """What one replica holds."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.acquire_slot()
        self._unconfirmed: set[int] = set()
        self._guesses: list[tuple[float, list[int]]] = []
        """A heap by expiry."""
        self._history: dict[int, int] = {}
        """period -> slot"""

    @property
    def slots(self) -> tuple[int, ...]:
        """All that speak for this replica."""
        return (self.slot, *self._history.values())

    def stored(self, hashes: Sequence[int], tokens: Sequence[int]) -> None:
        self._index.add(self.slot, hashes, tokens)
        if self._unconfirmed:
            self._unconfirmed.difference_update(hashes)

    def removed(self, hashes: Sequence[int]) -> None:
        self._index.remove(self.slot, hashes)
        if self._unconfirmed:
            self._unconfirmed.difference_update(hashes)

    def clear(self) -> None:
        """Everything known is void. A fresh slot makes that instant; the index scrubs the old one at leisure."""
        self.close()
        self.slot = self._index.acquire_slot()

    def close(self) -> None:
        """The replica left."""
        for slot in self.slots:
            self._index.retire_slot(slot)
        self._history.clear()
        self._unconfirmed.clear()
        self._index.guessed -= sum(len(hashes) for _, hashes in self._guesses)
        self._guesses.clear()

    def guess(
        self,
        hashes: Sequence[int],
        tokens: Callable[[], Sequence[int]],
        now: float,
        *,
        expected_s: float = 0.0,
    ) -> None:
        """The replica was sent this prompt and will announce it, computed, in about `expected_s`."""
        added = self._index.guess(self.slot, hashes, tokens)
        if added:
            self._unconfirmed.update(added)
            heappush(
                self._guesses, (now + min(MAX_GUESS_TTL_S, max(GUESS_TTL_S, TTFT_FACTOR * expected_s)), added)
            )
            index = self._index
            index.guessed += len(added)
            while index.guessed > index.max_guesses and self._guesses:
                self._end_first_guess()

    def remember(self, hashes: Sequence[int], tokens: Callable[[], Sequence[int]], now: float) -> None:
        """The replica was sent this prompt and will announce nothing."""
        period = int(now / HISTORY_S)
        slot = self._history.get(period)
        if slot is None:
            slot = self._history[period] = self._index.acquire_slot()
        self._index.guess(slot, hashes, tokens)

    def expire(self, now: float) -> None:
        """Erases guesses that were never confirmed, and history."""
        guesses = self._guesses
        while guesses and guesses[0][0] <= now:
            self._end_first_guess()
        period = int(now / HISTORY_S)
        for past in [past for past in self._history if past < period - 1]:
            self._index.retire_slot(self._history.pop(past))

    def _end_first_guess(self) -> None:
        """Erases what is unconfirmed of the guess that expires first."""
        _, hashes = heappop(self._guesses)
        self._index.guessed -= len(hashes)
        late = self._unconfirmed.intersection(hashes)
        if late:
            self._unconfirmed -= late
            self._index.remove(self.slot, late)

    @property
    def has_guesses(self) -> bool:
        """Whether some chunk is only expected, not announced."""
        return bool(self._unconfirmed)

    def is_guess(self, chunk: int) -> bool:
        """Whether `chunk` is only expected, not announced."""
        return chunk in self._unconfirmed
