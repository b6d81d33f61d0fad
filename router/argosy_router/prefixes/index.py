"""Which replica holds which prefix: chunk hash -> bitset of replicas, and prompt tokens up to that chunk.

Owns: what is believed to be cached where, for one service.
Must not know: replicas' addresses, telemetry frames, policies, time.
Invariants: entries never exceed `capacity`, and those that were announced or asked for longest ago leave first; a slot
is handed out again only when no entry mentions it; a wrong entry costs speed, never correctness.

A chunk hash covers everything before it, so a chain needs no tree: `match` walks the hashes of a prompt and drops a
replica at its first missing chunk. Each entry is one Python int, `bits << 32 | tokens` (tokens are a function of the
prompt and the model, hence stored once), and entries live in 256 dicts by the hash's low byte, so that no dict's growth
stops the loop for long; nor does the scrubbing of a departed replica's bits, which goes by `SCRUB_STEP` entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from sys import getsizeof
from typing import NamedTuple

SHARDS = 256
SCRUB_STEP = 512
"""Entries scrubbed in one go: some 0.2 ms, most of it waiting for memory."""
DEFAULT_CAPACITY = 1_000_000
"""Chunks. The router gives its indexes what memory allows (`index_memory`)."""
GUESS_SHARE = 4
"""At most a quarter as many guesses as entries."""
_KEY_BYTES = 48
"""A 64-bit int as CPython allocates it."""
_GUESS_BYTES = 110
"""A chunk in a list and in a set, at the latter's emptiest."""

_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


class PrefixIndex:
    """The index of one service."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._free: list[int] = []
        self._slots = 0
        self._retired: dict[int, int] = {}
        """slot -> shards still to scrub"""
        self._scrubbing: _Scrubbing | None = None
        self._live = 0
        """Bits of the slots in use."""
        self.slot_changes = 0
        """Grows whenever a slot is taken or given up."""
        self.guessed = 0
        """Chunks that replicas are expected to announce, as `residency` counts them."""
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Changes the cap; surplus entries leave as new ones come, or by `trim`."""
        self.capacity = max(SHARDS, capacity)
        self._shard_capacity = self.capacity // SHARDS
        self._shard_bytes = _table_bytes(max(3, (3 * self._shard_capacity - 1).bit_length()))
        self.max_guesses = self.capacity // GUESS_SHARE

    def capacity_within(self, limit: int) -> int:
        """The largest capacity whose entries and guesses never take more than `limit` bytes, with the replicas there
        are now. A dict that grows takes the power of two from three times its entries on, so full shards differ."""
        each = self._object_bytes + _GUESS_BYTES // GUESS_SHARE
        limit //= SHARDS
        sizes = range(3, max(4, limit.bit_length()))
        return SHARDS * max(min((1 << size) // 3, (limit - _table_bytes(size)) // each) for size in sizes)

    @property
    def bytes(self) -> int:
        """Memory it takes now."""
        objects = len(self) * self._object_bytes + self.guessed * _GUESS_BYTES
        return objects + sum(map(getsizeof, self._shards))

    @property
    def _object_bytes(self) -> int:
        """Key and value of an entry, which has a bit for each slot, as the allocator rounds them."""
        return _KEY_BYTES + (getsizeof(1 << (self._slots + _TOKEN_BITS)) + 15 & ~15)

    @property
    def is_overfull(self) -> bool:
        """Whether there is something to trim."""
        entries, table = self._shard_capacity, self._shard_bytes
        return any(len(shard) > entries or getsizeof(shard) > table for shard in self._shards)

    def trim(self, number: int) -> None:
        """Makes one of the `SHARDS` fit a capacity that has shrunk."""
        shard = self._shards[number]
        if len(shard) > self._shard_capacity:
            self._evict(shard)
        if getsizeof(shard) > self._shard_bytes:
            self._shards[number] = dict(iter(shard.items()))  # dicts do not shrink by themselves

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    # slots

    def acquire_slot(self) -> int:
        """A slot no entry mentions."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._slots
            self._slots += 1
        self._live |= 1 << slot
        self.slot_changes += 1
        return slot

    def retire_slot(self, slot: int) -> None:
        """The slot's knowledge is void from now on. Costs nothing here: `scrub` erases its bits later."""
        self._live &= ~(1 << slot)
        self.slot_changes += 1
        self._retired[slot] = SHARDS

    def scrub(self) -> bool:
        """Erases retired slots' bits from the next `SCRUB_STEP` entries; call until it returns False."""
        if not self._retired:
            return False
        job = self._scrubbing or self._next_to_scrub()
        shard = self._shards[job.shard_number]
        chunks = job.chunks[-SCRUB_STEP:]
        del job.chunks[-SCRUB_STEP:]
        keep = ~sum(1 << (slot + _TOKEN_BITS) for slot in job.slots)
        for chunk in chunks:
            entry = shard.get(chunk, 0)
            kept = entry & keep
            if kept != entry:
                if kept >> _TOKEN_BITS:
                    shard[chunk] = kept
                else:
                    del shard[chunk]
        self._scrubbing = job if job.chunks else None
        if not job.chunks:
            self._left_shard(job)
        return bool(self._retired)

    def _next_to_scrub(self) -> _Scrubbing:
        number = max(self._retired.values()) - 1
        slots = [slot for slot, left in self._retired.items() if left > number]
        return _Scrubbing(number, slots, list(self._shards[number]))

    def _left_shard(self, job: _Scrubbing) -> None:
        for slot in job.slots:
            if job.shard_number:
                self._retired[slot] = job.shard_number
            else:
                del self._retired[slot]
                self._free.append(slot)

    # knowledge

    def add(self, slot: int, hashes: Iterable[int], tokens: Iterable[int]) -> None:
        """`slot` holds these chunks; `tokens[i]` are the prompt tokens up to and including chunk i."""
        bit = 1 << (slot + _TOKEN_BITS)
        shards = self._shards
        for chunk, count in zip(hashes, tokens, strict=True):
            shard = shards[chunk & 255]
            entry = shard.get(chunk)
            if entry is not None:
                shard[chunk] = (entry & ~_TOKEN_MASK) | bit | (count & _TOKEN_MASK)
            else:
                if len(shard) >= self._shard_capacity:
                    self._evict(shard)
                shard[chunk] = bit | (count & _TOKEN_MASK)

    def guess(self, slot: int, hashes: Sequence[int], tokens: Callable[[], Sequence[int]]) -> list[int]:
        """A prompt of these chunks is sent to `slot`: it is expected to hold them all, and they count as just used.

        `tokens` is asked for estimates if some chunk is new. Returns the chunks the slot did not have before.
        """
        bit = 1 << (slot + _TOKEN_BITS)
        shards = self._shards
        added = []
        estimates: Sequence[int] = ()
        for position, chunk in enumerate(hashes):
            shard = shards[chunk & 255]
            entry = shard.pop(chunk, None)  # it goes to the end: the oldest leave first
            if entry is None:
                estimates = estimates or tokens()
                if len(shard) >= self._shard_capacity:
                    self._evict(shard)
                shard[chunk] = bit | (estimates[position] & _TOKEN_MASK)
                added.append(chunk)
                continue
            if not entry & bit:
                added.append(chunk)
            shard[chunk] = entry | bit
        return added

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """`slot` no longer holds these chunks."""
        bit = 1 << (slot + _TOKEN_BITS)
        shards = self._shards
        for chunk in hashes:
            shard = shards[chunk & 255]
            entry = shard.get(chunk)
            if entry is not None and entry & bit:
                entry ^= bit
                if entry >> _TOKEN_BITS:
                    shard[chunk] = entry
                else:
                    del shard[chunk]

    def holds(self, slot: int, chunk: int) -> bool:
        return bool(self._shards[chunk & 255].get(chunk, 0) >> (slot + _TOKEN_BITS) & 1)

    def match(self, hashes: Sequence[int]) -> tuple[dict[int, int], int]:
        """Longest run of held chunks from the start, per slot.

        Returns `{slot: prompt tokens of its run}`, shortest runs first (slots whose run is worth nothing are absent),
        and the number of chunks of the longest run.
        """
        shards = self._shards
        alive = self._live
        runs: dict[int, int] = {}
        entry = 0
        length = 0
        for chunk in hashes:
            following = shards[chunk & 255].get(chunk)
            if following is None:
                break
            held = alive & (following >> _TOKEN_BITS)
            if held != alive:
                if (
                    entry & _TOKEN_MASK
                ):  # else nothing so far, or less than a block, as the role that chats begin with
                    _assign(runs, alive ^ held, entry & _TOKEN_MASK)
                alive = held
                if not held:
                    break
            entry = following
            length += 1
        if alive and entry & _TOKEN_MASK:
            _assign(runs, alive, entry & _TOKEN_MASK)
        return runs, length

    def _evict(self, shard: dict[int, int]) -> None:
        """Makes room: the 1/64 of the shard that was unused longest goes."""
        surplus = len(shard) - self._shard_capacity + 1 + (self._shard_capacity >> 6)
        for chunk in [chunk for chunk, _ in zip(shard, range(surplus), strict=False)]:
            del shard[chunk]


def _table_bytes(size: int) -> int:
    """Bytes of a dict with `1 << size` slots: an index per slot, and room for entries in two thirds of them."""
    width = 1 if size < 8 else 2 if size < 16 else 4
    return 160 + (width << size) + 24 * ((2 << size) // 3)


class _Scrubbing(NamedTuple):
    """The shard being scrubbed."""

    shard_number: int
    slots: list[int]
    """Whose bits go."""
    chunks: list[int]
    """Entries still to look at. Those that come meanwhile cannot mention a retired slot."""


_FEW = 16


def _assign(runs: dict[int, int], bits: int, tokens: int) -> None:
    """`runs[slot] = tokens` for every slot in `bits`."""
    if bits.bit_count() > _FEW:  # long integers: one pass over the digits instead of arithmetic per bit
        runs.update(
            dict.fromkeys([slot for slot, digit in enumerate(f"{bits:b}"[::-1]) if digit == "1"], tokens)
        )
        return
    while bits:
        low = bits & -bits
        runs[low.bit_length() - 1] = tokens
        bits ^= low
