"""One replica's part of the prefix index: what it announced, and what we expect it to hold.

Owns: the replica's slot, and guesses awaiting confirmation.
Must not know: frames, sockets, other replicas.
Invariant: a guess about a synced replica is confirmed by an announcement or erased after `GUESS_TTL_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from argosy_router.index import PrefixIndex

GUESS_TTL_S = 10.0
"""A prompt's chunks are announced once they are computed: at least twice a bad time to first token. Too long sends
followers to a replica that never got the prefix; too short scatters a burst."""
TTFT_FACTOR = 2.0
"""A guess about a prompt behind a long queue lives this many times as long as the first token is expected to take."""


class Residency:
    """What one replica holds."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.acquire_slot()
        self._unconfirmed: set[int] = set()
        self._guesses: list[tuple[float, list[int]]] = []
        """A heap by expiry."""

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
        self._index.retire_slot(self.slot)
        self._unconfirmed.clear()
        self._guesses.clear()

    def guess(
        self,
        hashes: Sequence[int],
        tokens: Callable[[], Sequence[int]],
        now: float,
        *,
        expires: bool,
        expected_s: float = 0.0,
    ) -> None:
        """The replica was sent this prompt and should have computed it in `expected_s`. Without announcements to
        come, the guess stays until evicted."""
        added = self._index.guess(self.slot, hashes, tokens, touch=not expires)
        if expires and added:
            self._unconfirmed.update(added)
            heappush(self._guesses, (now + max(GUESS_TTL_S, TTFT_FACTOR * expected_s), added))

    def expire(self, now: float) -> None:
        """Erases guesses that were never confirmed."""
        guesses = self._guesses
        while guesses and guesses[0][0] <= now:
            _, hashes = heappop(guesses)
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
