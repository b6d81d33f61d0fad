"""RankPrefixes: which data-parallel ranks hold which chunks of prompts in their prefix caches.

It follows the ranks' residency deltas and merges them into those of one cache that holds what any rank holds, which is
what routers are told. Invariant: whoever applies every merged delta has exactly the chunks that at least one rank
holds.

An entry is a bit mask of ranks, so looking up a prompt costs one dictionary access per chunk, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.messages.core_messages import ChunkEnd, ResidencyDelta


class RankPrefixes:
    def __init__(self, num_ranks: int) -> None:
        self._all = (1 << num_ranks) - 1
        self._holders: dict[int, int] = {}
        """Chunk hash -> bit mask of the ranks that hold it, never zero."""

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, rank: int, delta: ResidencyDelta) -> ResidencyDelta | None:
        """Apply a rank's delta, and return the merged one; None if nothing changed for all ranks together."""
        bit, holders = 1 << rank, self._holders
        merged = ResidencyDelta(removed=[], stored=[])
        if delta.cleared:
            self._remove(bit, [chunk for chunk, mask in holders.items() if mask & bit], merged)
            if not holders:
                merged.cleared, merged.removed = True, []
        self._remove(bit, delta.removed, merged)
        for end in delta.stored:
            mask = holders.get(end.hash, 0)
            holders[end.hash] = mask | bit
            if not mask:
                merged.stored.append(end)
        return merged if merged.cleared or merged.removed or merged.stored else None

    def _remove(self, bit: int, chunks: Sequence[int], merged: ResidencyDelta) -> None:
        for chunk in chunks:
            mask = self._holders.get(chunk, 0)
            if mask == bit:
                del self._holders[chunk]
                merged.removed.append(chunk)
            elif mask & bit:
                self._holders[chunk] = mask ^ bit

    def hits(self, chunk_ends: Sequence[ChunkEnd]) -> dict[int, int]:
        """Return the number of tokens of the longest prefix that each rank holds; ranks without one are left out."""
        hits: dict[int, int] = {}
        holding, covered = self._all, 0
        for end in chunk_ends:
            still = holding & self._holders.get(end.hash, 0)
            if covered and still != holding:
                hits.update(dict.fromkeys(_ranks(holding ^ still), covered))
            holding = still
            if not holding:
                break
            covered = end.token_end
        if covered and holding:
            hits.update(dict.fromkeys(_ranks(holding), covered))
        return hits


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
