"""WaitingTokens: estimates how many tokens waiting requests will have to compute, without those in the prefix cache.

The count is updated on every event, so reading it is O(1). A block of a waiting prompt counts while the prefix cache
does not hold it, and only once however many prompts begin with it, because the first of them to be admitted computes it
for all. It is an estimate: a hit needs an unbroken run of blocks, and cached blocks may be evicted before admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class WaitingTokens:
    """Count of the uncached tokens of all waiting requests.

    Args:
        block_size: tokens per block.
        is_cached: tells whether the prefix cache holds a block with this hash.

    Attributes:
        num_tokens: tokens that all waiting requests have to compute.

    Invariant: `num_tokens` is the sum of all tokens outside of shareable blocks, plus `block_size` for every distinct
    shareable block that is not cached.
    """

    def __init__(self, block_size: int, is_cached: Callable[[bytes], bool]) -> None:
        self.num_tokens = 0
        self._block_size = block_size
        self._is_cached = is_cached
        self._num_requests: dict[bytes, int] = {}
        """Hash of a shareable block -> number of waiting requests that begin with it."""
        self._prompts: dict[str, tuple[int, Sequence[bytes]]] = {}
        """Request id -> tokens that it computes in any case, and the hashes of its shareable blocks."""

    def add(self, request_id: str, num_tokens: int, block_hashes: Sequence[bytes]) -> None:
        """Count a request that starts to wait.

        Args:
            num_tokens: all its known tokens.
            block_hashes: hashes of the leading blocks that it could take from the prefix cache.
        """
        num_alone = num_tokens - len(block_hashes) * self._block_size
        self._prompts[request_id] = num_alone, block_hashes
        self.num_tokens += num_alone
        counts = self._num_requests
        for block_hash in block_hashes:
            count = counts.get(block_hash, 0)
            counts[block_hash] = count + 1
            if count == 0 and not self._is_cached(block_hash):
                self.num_tokens += self._block_size

    def remove(self, request_id: str) -> None:
        """Stop counting a request that is admitted or has ended. Raises KeyError if it does not wait."""
        num_alone, block_hashes = self._prompts.pop(request_id)
        self.num_tokens -= num_alone
        counts = self._num_requests
        for block_hash in block_hashes:
            count = counts[block_hash] - 1
            if count:
                counts[block_hash] = count
                continue
            del counts[block_hash]
            if not self._is_cached(block_hash):
                self.num_tokens -= self._block_size

    def cached(self, block_hash: bytes) -> None:
        """Note that the prefix cache now holds this block."""
        if block_hash in self._num_requests:
            self.num_tokens -= self._block_size

    def evicted(self, block_hash: bytes) -> None:
        """Note that the prefix cache no longer holds this block."""
        if block_hash in self._num_requests:
            self.num_tokens += self._block_size

    def check(self, request_ids: Iterable[str]) -> None:
        """Assert the invariant and that exactly these requests wait. O(tokens); for tests and the idle engine."""
        assert set(self._prompts) == set(request_ids)
        shareable = {block_hash for _, block_hashes in self._prompts.values() for block_hash in block_hashes}
        assert set(self._num_requests) == shareable
        uncached = sum(not self._is_cached(block_hash) for block_hash in shareable)
        alone = sum(num_alone for num_alone, _ in self._prompts.values())
        assert self.num_tokens == alone + uncached * self._block_size
