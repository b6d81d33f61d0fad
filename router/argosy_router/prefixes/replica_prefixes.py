"""One replica's part of the prefix index: what it has announced, and what the router expects it to hold.

Owns: the replica's slots, speculative inserts awaiting confirmation, the history of prompts it was sent.
Must not know: frames, sockets, other replicas.
Invariants: for a replica with telemetry, a speculative insert is confirmed or erased after `MAX_SPECULATIVE_TTL_S` at
the latest, and those of all replicas together stay within the index's `max_speculative`. For a replica without
telemetry, the prompts it was sent count as cached for one to two periods of `HISTORY_S` after their last use.

The history has one slot per period, so that forgetting a period only retires its slot, whatever it holds. Replicas
begin their periods at different times, because what follows a change of slots costs more than the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from argosy_router.prefixes.index import PrefixIndex

SPECULATIVE_TTL_S = 10.0
"""Minimum lifetime of a speculative insert: twice a bad time to first token, because a prompt's chunks are announced
once they are computed. With a longer one, requests would follow a prefix to a replica that never got it; with a shorter
one, a burst of requests with one prefix would scatter."""
TTFT_FACTOR = 2.0
"""For a prompt behind a long queue, the lifetime as a multiple of the expected time to first token."""
MAX_SPECULATIVE_TTL_S = 300.0
"""Maximum lifetime: a request that waits longer has been aborted by its client or its replica."""
HISTORY_S = 300.0
"""A conversation's next turn comes within minutes, and a busy cache is replaced in about that time."""


_GOLDEN = 0.6180339887498949
"""Multiples of it are spread evenly over the fractions, however many there are."""


class ReplicaPrefixes:
    """The prefixes that one replica holds or is expected to hold."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.acquire_slot()
        self._phase_s = self.slot * _GOLDEN % 1.0 * HISTORY_S
        """How much earlier than those of the first replica its periods begin."""
        self._unconfirmed: set[int] = set()
        self._speculative_inserts: list[tuple[float, list[int]]] = []
        """Heap of (expiry, chunks)."""
        self._history: dict[int, int] = {}
        """period -> slot"""

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots of this replica: the announced one, then its history."""
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
        """Forget everything. Taking a fresh slot makes this immediate; the index scrubs the old ones later."""
        self.close()
        self.slot = self._index.acquire_slot()

    def close(self) -> None:
        """Retire all slots: the replica has left."""
        for slot in self.slots:
            self._index.retire_slot(slot)
        self._history.clear()
        self._unconfirmed.clear()
        self._index.num_speculative -= sum(len(hashes) for _, hashes in self._speculative_inserts)
        self._speculative_inserts.clear()

    def insert_speculatively(
        self,
        hashes: Sequence[int],
        tokens: Callable[[], Sequence[int]],
        now: float,
        *,
        expected_s: float = 0.0,
    ) -> None:
        """Insert a prompt speculatively: the replica was sent it and will announce its chunks in about `expected_s`."""
        added = self._index.insert_speculatively(self.slot, hashes, tokens)
        if added:
            self._unconfirmed.update(added)
            heappush(self._speculative_inserts, (now + _lifetime_s(expected_s), added))
            index = self._index
            index.num_speculative += len(added)
            while index.num_speculative > index.max_speculative and self._speculative_inserts:
                self._erase_first_insert()

    def remember(self, hashes: Sequence[int], tokens: Callable[[], Sequence[int]], now: float) -> None:
        """Record a prompt in the history: the replica was sent it and has no telemetry to announce it."""
        period = self._period(now)
        slot = self._history.get(period)
        if slot is None:
            slot = self._history[period] = self._index.acquire_slot()
        self._index.insert_speculatively(slot, hashes, tokens)

    def expire(self, now: float) -> None:
        """Erase speculative inserts that were not confirmed in time, and past periods of the history."""
        inserts = self._speculative_inserts
        while inserts and inserts[0][0] <= now:
            self._erase_first_insert()
        period = self._period(now)
        for past in [past for past in self._history if past < period - 1]:
            self._index.retire_slot(self._history.pop(past))

    def _period(self, now: float) -> int:
        return int((now + self._phase_s) / HISTORY_S)

    def _erase_first_insert(self) -> None:
        """Erase the unconfirmed chunks of the speculative insert that expires first."""
        _, hashes = heappop(self._speculative_inserts)
        self._index.num_speculative -= len(hashes)
        late = self._unconfirmed.intersection(hashes)
        if late:
            self._unconfirmed -= late
            self._index.remove(self.slot, late)

    @property
    def num_unconfirmed(self) -> int:
        """Number of chunks that were inserted speculatively and are not confirmed."""
        return len(self._unconfirmed)

    @property
    def has_unconfirmed(self) -> bool:
        """Whether some chunk was inserted speculatively and is not confirmed."""
        return bool(self._unconfirmed)

    def is_unconfirmed(self, chunk: int) -> bool:
        """Whether `chunk` was inserted speculatively and is not confirmed."""
        return chunk in self._unconfirmed


def _lifetime_s(expected_s: float) -> float:
    """Return how long an insert waits for its confirmation, which is expected in `expected_s`."""
    return min(MAX_SPECULATIVE_TTL_S, max(SPECULATIVE_TTL_S, TTFT_FACTOR * expected_s))
