"""Which replica holds which prefix: chunk hash -> replicas, and prompt tokens up to that chunk.

Owns: the slots that stand for what replicas hold, the cap on what is believed to be cached where, for one service.
Must not know: replicas' addresses, telemetry frames, policies, time.
Invariants: entries never exceed `capacity`, and those that were announced or asked for longest ago leave first; a slot
is handed out again only when no entry mentions it, the lowest first, and the highest are given up when they are free,
so that entries do not stay as wide as a fleet once was; a wrong entry costs speed, never correctness.

A chunk hash covers everything before it, so a chain needs no tree: `match` walks the hashes of a prompt and drops a
replica at its first missing chunk. Entries are sharded, and a departed replica's bits are scrubbed shard by shard, so
that nothing stops the loop for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from argosy_router.native.chunk_table import ChunkTable

SHARDS = 256
DEFAULT_CAPACITY = 1_000_000
"""Chunks. The router gives its indexes what memory allows (`index_memory`)."""
GUESS_SHARE = 4
"""At most a quarter as many guesses as entries."""
_GUESS_BYTES = 110
"""A chunk in a list and in a set, at the latter's emptiest."""


class PrefixIndex:
    """The index of one service."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._table = ChunkTable(SHARDS)
        self._free: list[int] = []
        """A heap: the lowest goes first, so that the highest can be given up."""
        self._slots = 0
        self._wide = 0
        """Shards whose entries have room for slots that were given up."""
        self._retired: dict[int, int] = {}
        """slot -> shards still to scrub"""
        self._scrubbed: list[int] = []
        """Slots that the scrubbing of the current shard began with; empty between shards."""
        self.slot_changes = 0
        """Grows whenever a slot is taken or given up."""
        self.guessed = 0
        """Chunks that replicas are expected to announce, as `residency` counts them."""
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Changes the cap; surplus entries leave as new ones come, or by `trim`."""
        self.capacity = max(SHARDS, capacity)
        self._table.resize(self.capacity // SHARDS)
        self.max_guesses = self.capacity // GUESS_SHARE

    def capacity_within(self, limit: int) -> int:
        """The largest capacity whose entries and guesses never take more than `limit` bytes, with the replicas there
        are now."""
        return SHARDS * self._table.shard_capacity(limit // SHARDS, _GUESS_BYTES // GUESS_SHARE)

    @property
    def bytes(self) -> int:
        """Memory it takes now."""
        return self._table.bytes + self.guessed * _GUESS_BYTES

    @property
    def is_overfull(self) -> bool:
        """Whether there is something to trim."""
        return self._table.is_overfull

    def trim(self, number: int) -> None:
        """Makes one of the `SHARDS` fit a capacity that has shrunk."""
        self._table.trim(number)

    def __len__(self) -> int:
        return len(self._table)

    # slots

    def acquire_slot(self) -> int:
        """A slot no entry mentions."""
        if self._free:
            slot = heappop(self._free)
        else:
            slot = self._slots
            self._slots += 1
        self._table.set_live(slot, True)
        self.slot_changes += 1
        return slot

    def retire_slot(self, slot: int) -> None:
        """The slot's knowledge is void from now on. Costs nothing here: `scrub` erases its bits later."""
        self._table.set_live(slot, False)
        self.slot_changes += 1
        self._retired[slot] = SHARDS

    def scrub(self) -> bool:
        """Erases retired slots' bits from a shard, or part of it, or narrows it; call until it returns False."""
        if not self._retired:
            if self._wide:
                self._wide -= 1
                self._table.narrow_shard(self._wide)
            return self._wide > 0
        number = max(self._retired.values()) - 1
        slots = self._scrubbed or [slot for slot, left in self._retired.items() if left > number]
        if self._table.scrub(number, slots):
            for slot in slots:
                self._left_shard(slot, number)
            slots = []
        self._scrubbed = slots
        return bool(self._retired) or self._wide > 0

    def _left_shard(self, slot: int, number: int) -> None:
        if number:
            self._retired[slot] = number
        else:
            del self._retired[slot]
            heappush(self._free, slot)
            self._give_up_slots()

    def _give_up_slots(self) -> None:
        """Forgets the highest slots while they are free: each entry has room for as many as there are."""
        free, before = set(self._free), self._slots
        while self._slots and self._slots - 1 in free:
            self._slots -= 1
        if self._slots < before:
            self._free = sorted(slot for slot in free if slot < self._slots)
            if self._table.narrow(self._slots):
                self._wide = SHARDS

    # knowledge

    def add(self, slot: int, hashes: Iterable[int], tokens: Iterable[int]) -> None:
        """`slot` holds these chunks; `tokens[i]` are the prompt tokens up to and including chunk i."""
        self._table.add(slot, hashes, tokens)

    def guess(self, slot: int, hashes: Sequence[int], tokens: Callable[[], Sequence[int]]) -> list[int]:
        """A prompt of these chunks is sent to `slot`: it is expected to hold them all, and they count as just used.

        `tokens` is asked for estimates if some chunk is new. Returns the chunks the slot did not have before.
        """
        return self._table.guess(slot, hashes, tokens)

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """`slot` no longer holds these chunks."""
        self._table.remove(slot, hashes)

    def holds(self, slot: int, chunk: int) -> bool:
        return self._table.holds(slot, chunk)

    def match(self, hashes: Sequence[int]) -> tuple[dict[int, int], int]:
        """Longest run of held chunks from the start, per slot.

        Returns `{slot: prompt tokens of its run}`, shortest runs first (slots whose run is worth nothing are absent),
        and the number of chunks of the longest run.
        """
        return self._table.match(hashes)
