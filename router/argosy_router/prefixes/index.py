"""Prefix index of one service: chunk hash -> replicas that hold the chunk, and prompt tokens up to it.

Owns: the slots that stand for replicas' caches, and the cap on the number of entries.
Must not know: replicas' addresses, telemetry frames, policies, time.
Invariants: entries never exceed `capacity`, and the entry announced or requested longest ago is evicted first. A slot
is reused only when no entry mentions it, the lowest first; the highest slots are given up while they are free, so that
entries with room for all slots shrink again with the fleet. A wrong entry costs speed, never correctness.

A chunk hash covers everything before it, so no tree is needed: `match` walks the hashes of a prompt and drops a replica
at its first missing chunk. Entries are sharded, and the bits of a replica that left are scrubbed shard by shard, so
that no operation blocks the event loop for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from argosy_router.native.chunk_table import ChunkTable

SHARDS = 256
DEFAULT_CAPACITY = 1_000_000
"""In chunks. The router then sizes its indexes by the memory it has (`index_memory`)."""
SPECULATIVE_SHARE = 4
"""At most 1/4 as many speculative inserts as the capacity,"""
MAX_SPECULATIVE = 1 << 19
"""and no more than prompts of 33 million tokens that their replicas have not computed yet."""
_SPECULATIVE_BYTES = 110
"""Bytes of a chunk in a list and in a set, with the set at its emptiest."""


class PrefixIndex:
    """The index of one service."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._table = ChunkTable(SHARDS)
        self._free: list[int] = []
        """Heap of free slots: the lowest is taken first, so that the highest can be given up."""
        self._slots = 0
        self._wide = 0
        """Number of shards whose entries still have room for slots that were given up."""
        self._retired: dict[int, int] = {}
        """slot -> shards still to scrub"""
        self._scrubbed: list[int] = []
        """Slots being scrubbed from the current shard, fixed when it was begun; empty between shards."""
        self.slot_changes = 0
        """Incremented whenever a slot is acquired or retired."""
        self.num_speculative = 0
        """Chunks inserted speculatively, which replicas are expected to announce; counted by `replica_prefixes`."""
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Change the capacity; surplus entries are evicted as new ones are inserted, or by `trim`."""
        self.capacity = max(SHARDS, capacity)
        self._table.resize(self.capacity // SHARDS)
        self._note_capacity()

    def _note_capacity(self) -> None:
        self.max_speculative = min(self.capacity // SPECULATIVE_SHARE, MAX_SPECULATIVE)

    def fit(self, limit: int) -> None:
        """Change the capacity to the largest with which the index never takes more than `limit` bytes. Call it again
        now and then: with more holders of many chunks there is room for fewer chunks."""
        shard_limit, beside = self._within(limit)
        self.capacity = SHARDS * self._table.shard_capacity(shard_limit, beside)
        self._table.resize(self.capacity // SHARDS, shard_limit)
        self._note_capacity()

    def capacity_within(self, limit: int) -> int:
        """The largest capacity whose entries and speculative inserts never take more than `limit` bytes with the
        current number of slots, and the current number of chunks that many slots hold."""
        return SHARDS * self._table.shard_capacity(*self._within(limit))

    def _within(self, limit: int) -> tuple[int, int]:
        """Return what each shard may take of `limit` bytes, and for each entry beside that."""
        each = _SPECULATIVE_BYTES // SPECULATIVE_SHARE
        if SHARDS * self._table.shard_capacity(limit // SHARDS, each) < SPECULATIVE_SHARE * MAX_SPECULATIVE:
            return limit // SHARDS, each
        return (limit - MAX_SPECULATIVE * _SPECULATIVE_BYTES) // SHARDS, 0

    @property
    def bytes(self) -> int:
        """Memory used now."""
        return self._table.bytes + self.num_speculative * _SPECULATIVE_BYTES

    @property
    def is_overfull(self) -> bool:
        """Whether some shard exceeds the capacity and can be trimmed."""
        return self._table.is_overfull

    def trim(self, number: int) -> None:
        """Shrink shard `number` to a capacity that was reduced."""
        self._table.trim(number)

    def __len__(self) -> int:
        return len(self._table)

    # slots

    def acquire_slot(self) -> int:
        """Take a slot that no entry mentions."""
        if self._free:
            slot = heappop(self._free)
        else:
            slot = self._slots
            self._slots += 1
        self._table.set_live(slot, True)
        self.slot_changes += 1
        return slot

    def retire_slot(self, slot: int) -> None:
        """Invalidate everything in a slot. This is immediate; `scrub` erases its bits later."""
        self._table.set_live(slot, False)
        self.slot_changes += 1
        self._retired[slot] = SHARDS

    def scrub(self) -> bool:
        """Do one step of cleaning: erase retired slots from (part of) a shard, or narrow a shard. Call until False."""
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
        """Give up the highest slots while they are free, since entries of many holders (here all, in C the bitmaps)
        have room for all slots."""
        free, before = set(self._free), self._slots
        while self._slots and self._slots - 1 in free:
            self._slots -= 1
        if self._slots < before:
            self._free = sorted(slot for slot in free if slot < self._slots)
            if self._table.narrow(self._slots):
                self._wide = SHARDS

    # entries

    def add(self, slot: int, hashes: Iterable[int], tokens: Iterable[int]) -> None:
        """Note that `slot` holds these chunks; `tokens[i]` are the prompt tokens up to and including chunk i."""
        self._table.add(slot, hashes, tokens)

    def insert_speculatively(
        self, slot: int, hashes: Sequence[int], tokens: Callable[[], Sequence[int]]
    ) -> list[int]:
        """Insert the chunks of a prompt that is sent to `slot` speculatively, and mark them as just used.

        `tokens` is called for estimates only if some chunk is new. Returns the chunks that the slot did not have.
        """
        return self._table.insert_speculatively(slot, hashes, tokens)

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """Note that `slot` no longer holds these chunks."""
        self._table.remove(slot, hashes)

    def holds(self, slot: int, chunk: int) -> bool:
        return self._table.holds(slot, chunk)

    def match(self, hashes: Sequence[int]) -> tuple[dict[int, int], int]:
        """Find the longest held prefix per slot.

        Returns `{slot: prompt tokens of its prefix}`, shortest first (slots without a prefix are absent), and the
        number of chunks of the longest.
        """
        return self._table.match(hashes)
