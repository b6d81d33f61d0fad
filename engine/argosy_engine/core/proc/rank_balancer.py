"""RankBalancer: chooses the engine core (data-parallel rank) of each request, and remembers it until the request ends.

    cost(rank) = queued(rank) + REQUEST_TOKENS * requests(rank) + prompt - hit(rank)        in tokens

    queued    prompt tokens to compute for requests that have no first token yet
    requests  those waiting and running
    hit       tokens of the prompt that the rank's prefix cache holds; 0 while its batch is full

The lowest cost wins, and equal ranks take turns, so that prompts without a cached prefix spread over all caches. All
requests of the cores come from this client, or those of other API processes, which tell their counts in shared memory;
nothing is asked of a core. A prefix whose rank has no free slot counts nothing, because a request would wait there for
as long as another one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from argosy_engine.messages import ChunkEnd, EngineCoreOutputs, EngineCoreRequest, ResidencyDelta
from argosy_engine.osproc import SharedCounters


class RankPrefixes:
    """Which ranks hold a prefix.

    It follows the ranks' residency deltas and merges them into those of one cache that holds what any rank holds, which
    is what routers are told. Invariant: whoever applies every merged delta has exactly the chunks that at least one
    rank holds. An entry is a bit mask of ranks, so looking up a prompt costs one dictionary access per chunk, for any
    number of ranks.
    """

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


REQUEST_TOKENS = 64
"""Cost of a running or waiting request, besides its prompt: about as many decode steps with a new one."""


class _Sent:
    """A request that a core has and that has not ended."""

    __slots__ = ("num_queued_tokens", "rank")

    def __init__(self, rank: int, num_queued_tokens: int) -> None:
        self.rank = rank
        self.num_queued_tokens = num_queued_tokens
        """Prompt tokens to compute; 0 once it has its first token."""


class RankBalancer:
    """
    Args:
        max_num_seqs: for each rank the size of its batch.
        counters: of several API processes; two columns for each rank.
    """

    def __init__(self, max_num_seqs: Sequence[int], counters: SharedCounters | None = None) -> None:
        self._counters = counters
        self._max_num_seqs = max_num_seqs
        self._prefixes = RankPrefixes(len(max_num_seqs))
        self._sent: dict[str, _Sent] = {}
        self._num_requests = [0] * len(max_num_seqs)
        self._num_queued_tokens = [0] * len(max_num_seqs)
        self._next = 0
        """Rank that is preferred among equal ones."""

    @property
    def num_requests(self) -> Sequence[int]:
        """For each rank the requests that have not ended, of all API processes."""
        return tuple(self._num_requests_of(rank) for rank in range(len(self._num_requests)))

    def _num_requests_of(self, rank: int) -> int:
        own = self._num_requests[rank]
        return own if self._counters is None else own + self._counters.others(2 * rank)

    def _num_queued_tokens_of(self, rank: int) -> int:
        own = self._num_queued_tokens[rank]
        return own if self._counters is None else own + self._counters.others(2 * rank + 1)

    def _count(self, rank: int, num_requests: int, num_queued_tokens: int) -> None:
        self._num_requests[rank] += num_requests
        self._num_queued_tokens[rank] += num_queued_tokens
        if self._counters is not None:
            self._counters.set(2 * rank, self._num_requests[rank])
            self._counters.set(2 * rank + 1, self._num_queued_tokens[rank])

    def add(self, request: EngineCoreRequest) -> int:
        """Return the rank of a request that is about to be sent: the one that it asks for, or the best."""
        hits = self._prefixes.hits(request.chunk_ends)
        size = len(request.prompt_token_ids) + len(request.resume_token_ids)
        rank = request.data_parallel_rank
        if rank is None:
            rank = self._best(size, hits)
            # A core's turns count the tokens that it computes: its share of the call's.
            if request.batch_offset:
                request.batch_offset = max(1, request.batch_offset // len(self._num_requests))
            request.data_parallel_rank = rank
        sent = _Sent(rank, max(size - hits.get(rank, 0), 0))
        self._sent[request.request_id] = sent
        self._count(rank, 1, sent.num_queued_tokens)
        return rank

    def _best(self, size: int, hits: dict[int, int]) -> int:
        count = len(self._num_requests)
        best, lowest = 0, -1
        for offset in range(count):
            rank = (self._next + offset) % count
            num_requests = self._num_requests_of(rank)
            cost = self._num_queued_tokens_of(rank) + REQUEST_TOKENS * num_requests + size
            if num_requests < self._max_num_seqs[rank]:
                cost -= min(hits.get(rank, 0), size)
            if lowest < 0 or cost < lowest:
                best, lowest = rank, cost
        self._next = (best + 1) % count
        return best

    def update(self, rank: int, outputs: EngineCoreOutputs) -> None:
        """Take over what a core's message says, and mark the message as that core's.

        Its residency becomes that of all cores together (`RankPrefixes`).
        """
        outputs.engine_index = rank
        if outputs.residency is not None:
            outputs.residency = self._prefixes.apply(rank, outputs.residency)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
            elif output.prefill_stats is not None and (sent := self._sent.get(output.request_id)) is not None:
                self._count(rank, 0, -sent.num_queued_tokens)
                sent.num_queued_tokens = 0

    def remove(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Forget requests that are aborted, and return their ids by rank; those that have ended are left out."""
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            rank = self._forget(request_id)
            if rank is not None:
                by_rank.setdefault(rank, []).append(request_id)
        return by_rank

    def _forget(self, request_id: str) -> int | None:
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return None
        self._count(sent.rank, -1, -sent.num_queued_tokens)
        return sent.rank
