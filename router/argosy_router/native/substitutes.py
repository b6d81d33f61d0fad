"""Python counterparts of what is written in C: the entries of a prefix index, token estimates, rendezvous ranking.

Owns, as `ChunkTable`: chunk hash -> the slots that hold the chunk, and prompt tokens up to it; the entries' order of
use, the cap per shard. Must not know: what a slot stands for, speculation, time.
Invariants: a shard never exceeds its capacity, and the entries announced or requested longest ago are evicted first;
there is no entry without a slot.

Here each entry is one Python int, `slots << 32 | tokens` (tokens are a function of the prompt and the model, hence
stored once). Entries are spread over many dicts by the hash's low bits, so that no dict's growth blocks the event loop
for long; scrubbing does `SCRUB_STEP` entries at a time for the same reason. In `_table.c` an entry takes 32 bytes of
flat memory, and more only if many slots hold the chunk. Hashes and tokens may be any iterables of integers; the C one
reads `array("Q")` and `array("I")` without copying.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from sys import getsizeof

import xxhash

from argosy_protocol.chunk_hash import chunk_offsets

SCRUB_STEP = 512
"""Entries scrubbed per call: some 0.2 ms, most of it waiting for memory."""
_KEY_BYTES = 48
"""A 64-bit int as CPython allocates it."""
_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


class ChunkTable:
    """Chunk table made of dicts; `shards`: number of shards, a power of two. A chunk's shard is given by the low bits
    of its hash."""

    def __init__(self, shards: int) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(shards)]
        self._low_bits = shards - 1
        self._slots = 0
        self._live = 0
        """Bit mask of the slots in use."""
        self._unscrubbed: list[int] = []
        """Chunks left to scrub in the current shard. Chunks added meanwhile cannot mention a retired slot."""
        self.resize(1)

    def resize(self, shard_capacity: int, limit: int = 0) -> None:
        """Change the capacity; surplus entries are evicted as new ones are inserted, or by `trim`. `limit`: bytes that
        a shard may take, by which `shard_capacity` was found; 0 for any. The table in C divides them between entries
        and the bitmaps of those with many holders; here all entries are alike."""
        self._capacity = shard_capacity
        self._dict_bytes = _dict_bytes(max(3, (3 * shard_capacity - 1).bit_length()))

    def shard_capacity(self, limit: int, beside: int) -> int:
        """The most entries per shard that, with `beside` bytes elsewhere for each, never take more than `limit` bytes
        at the current number of slots. A growing dict takes the next power of two from three times its entries on, so
        the sizes of full shards differ."""
        each = self._entry_bytes + beside
        sizes = range(3, max(4, limit.bit_length()))
        return max(min((1 << size) // 3, (limit - _dict_bytes(size)) // each) for size in sizes)

    @property
    def bytes(self) -> int:
        """Memory used now."""
        return len(self) * self._entry_bytes + sum(map(getsizeof, self._shards))

    @property
    def _entry_bytes(self) -> int:
        """Bytes of a key and of a value, which has a bit per slot, as the allocator rounds them."""
        return _KEY_BYTES + (getsizeof(1 << (self._slots + _TOKEN_BITS)) + 15 & ~15)

    @property
    def is_overfull(self) -> bool:
        """Whether some shard exceeds the capacity and can be trimmed."""
        entries, size = self._capacity, self._dict_bytes
        return any(len(shard) > entries or getsizeof(shard) > size for shard in self._shards)

    def trim(self, number: int) -> None:
        """Shrink one shard to a capacity that was reduced."""
        shard = self._shards[number]
        if len(shard) > self._capacity:
            self._evict(shard)
        if getsizeof(shard) > self._dict_bytes:
            self._shards[number] = dict(iter(shard.items()))  # dicts do not shrink by themselves

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def set_live(self, slot: int, is_live: bool) -> None:
        """Set whether `match` considers the slot. A slot must be live before anything is added to it."""
        self._slots = max(self._slots, slot + 1)
        self._live = self._live | 1 << slot if is_live else self._live & ~(1 << slot)

    def narrow(self, slots: int) -> bool:
        """Declare that only the first `slots` slots are live or mentioned, so that entries need no room for others.
        Returns whether `narrow_shard` must be called for every shard."""
        self._slots = min(self._slots, slots)
        return False  # an int is as long as its highest bit

    def narrow_shard(self, number: int) -> None:
        """Remove from a shard's entries the room for slots beyond those that `narrow` declared. Nothing to do here."""

    def scrub(self, number: int, slots: Iterable[int]) -> bool:
        """Erase these slots, which are no longer live, from the next entries of a shard. True when it is done."""
        shard = self._shards[number]
        if not self._unscrubbed:
            self._unscrubbed = list(shard)
        chunks = self._unscrubbed[-SCRUB_STEP:]
        del self._unscrubbed[-SCRUB_STEP:]
        keep = ~sum(1 << (slot + _TOKEN_BITS) for slot in slots)
        for chunk in chunks:
            entry = shard.get(chunk, 0)
            kept = entry & keep
            if kept != entry:
                if kept >> _TOKEN_BITS:
                    shard[chunk] = kept
                else:
                    del shard[chunk]
        return not self._unscrubbed

    def add(self, slot: int, hashes: Iterable[int], tokens: Iterable[int]) -> None:
        """Note that `slot` holds these chunks; `tokens[i]` are the prompt tokens up to and including chunk i."""
        bit = 1 << (slot + _TOKEN_BITS)
        shards, low_bits = self._shards, self._low_bits
        for chunk, count in zip(hashes, tokens, strict=True):
            shard = shards[chunk & low_bits]
            entry = shard.get(chunk)
            if entry is not None:
                shard[chunk] = (entry & ~_TOKEN_MASK) | bit | (count & _TOKEN_MASK)
            else:
                if len(shard) >= self._capacity:
                    self._evict(shard)
                shard[chunk] = bit | (count & _TOKEN_MASK)

    def insert_speculatively(
        self, slot: int, hashes: Sequence[int], tokens: Callable[[], Sequence[int]]
    ) -> list[int]:
        """Insert these chunks for `slot` speculatively, and mark them as just used.

        `tokens` is called for estimates only if some chunk is new. Returns the chunks that the slot did not have.
        """
        bit = 1 << (slot + _TOKEN_BITS)
        shards, low_bits = self._shards, self._low_bits
        added = []
        estimates: Sequence[int] = ()
        for position, chunk in enumerate(hashes):
            shard = shards[chunk & low_bits]
            entry = shard.pop(
                chunk, None
            )  # reinserted at the end: dicts keep insertion order, the oldest is evicted
            if entry is None:
                estimates = estimates or tokens()
                if len(shard) >= self._capacity:
                    self._evict(shard)
                shard[chunk] = bit | (estimates[position] & _TOKEN_MASK)
                added.append(chunk)
                continue
            if not entry & bit:
                added.append(chunk)
            shard[chunk] = entry | bit
        return added

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """Note that `slot` no longer holds these chunks."""
        bit = 1 << (slot + _TOKEN_BITS)
        shards, low_bits = self._shards, self._low_bits
        for chunk in hashes:
            shard = shards[chunk & low_bits]
            entry = shard.get(chunk)
            if entry is not None and entry & bit:
                entry ^= bit
                if entry >> _TOKEN_BITS:
                    shard[chunk] = entry
                else:
                    del shard[chunk]

    def holds(self, slot: int, chunk: int) -> bool:
        return bool(self._shards[chunk & self._low_bits].get(chunk, 0) >> (slot + _TOKEN_BITS) & 1)

    def match(self, hashes: Sequence[int]) -> tuple[dict[int, int], int]:
        """Find the longest held prefix per live slot.

        Returns `{slot: prompt tokens of its prefix}`, shortest first (slots without a prefix are absent), and the
        number of chunks of the longest.
        """
        shards, low_bits = self._shards, self._low_bits
        alive = self._live
        runs: dict[int, int] = {}
        tokens = 0
        length = 0
        for chunk in hashes:
            entry = shards[chunk & low_bits].get(chunk)
            if entry is None:
                break
            held = alive & (entry >> _TOKEN_BITS)
            # A prefix of zero tokens is none: the role that chats begin with is shorter than a block.
            if held != alive and tokens:
                _assign(runs, alive ^ held, tokens)
            alive = held
            if not held:
                break
            tokens = entry & _TOKEN_MASK
            length += 1
        if alive and tokens:
            _assign(runs, alive, tokens)
        return runs, length

    def _evict(self, shard: dict[int, int]) -> None:
        """Make room: evict the least recently used 1/64 of the shard."""
        surplus = len(shard) - self._capacity + 1 + (self._capacity >> 6)
        for chunk in [chunk for chunk, _ in zip(shard, range(surplus), strict=False)]:
            del shard[chunk]


def _dict_bytes(size: int) -> int:
    """Bytes of a dict of `1 << size` slots: an index for each, and room for entries in two thirds of them."""
    width = 1 if size < 8 else 2 if size < 16 else 4
    return 160 + (width << size) + 24 * ((2 << size) // 3)


_FEW = 16


def _assign(runs: dict[int, int], slots: int, tokens: int) -> None:
    """Set `runs[slot] = tokens` for every slot of the bit mask `slots`."""
    if slots.bit_count() > _FEW:  # for long integers, one pass over the digits beats arithmetic per bit
        runs.update(
            dict.fromkeys([slot for slot, digit in enumerate(f"{slots:b}"[::-1]) if digit == "1"], tokens)
        )
        return
    while slots:
        low = slots & -slots
        runs[low.bit_length() - 1] = tokens
        slots ^= low


_MOST = 2**32 - 1


def chunk_tokens(sizes: Iterable[int], bytes_per_token: float) -> array[int]:
    """For each chunk of `chunk_hashes`, estimate the prompt tokens up to and including it, rounded down (`array("I")`).

    Args:
        sizes: sizes of the segments in bytes.
        bytes_per_token: above 0.
    """
    return array("I", [int(min(_MOST, offset / bytes_per_token)) for offset in chunk_offsets(sizes)])


_xxh3 = xxhash.xxh3_64_intdigest


def first_ranked(names: Sequence[bytes], key: int) -> int:
    """Position of the name with the highest hash, seeded with the 64-bit key; the first of equals.

    Raises:
        ValueError: there is no name.
    """
    ranks = [_xxh3(name, key) for name in names]
    return ranks.index(max(ranks))
