"""Request: the core's view of one generation, from admission to its last token."""

from __future__ import annotations

import hashlib
import time
from array import array
from enum import IntEnum

from argosy_engine.core.messages import ChunkEnd, EngineCoreRequest, FinishReason
from argosy_engine.sample.params import SamplingParams


class RequestStatus(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Request:
    """Mutable state of a request. `num_computed_tokens` chases `num_tokens`; there are no phases.

    Invariant: `len(block_hashes) == num_tokens // block_size` when prefix caching is on.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "block_size",
        "chunk_ends",
        "finish_reason",
        "first_scheduled_at",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tied_chunks",
        "priority",
        "queued_at",
        "request_id",
        "root_hash",
        "sampling_params",
        "status",
        "stop_reason",
    )

    def __init__(self, message: EngineCoreRequest, block_size: int, hash_blocks: bool) -> None:
        self.request_id = message.request_id
        self.sampling_params: SamplingParams = message.sampling_params
        self.all_token_ids: list[int] = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.chunk_ends: list[ChunkEnd] = message.chunk_ends
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        """Prompt tokens found in the prefix cache at first schedule; -1 before."""
        self.num_preemptions = 0
        self.queued_at = time.monotonic()
        self.first_scheduled_at = 0.0
        self.block_ids: list[int] = []
        self.num_cached_blocks = 0
        """Leading blocks whose content is registered in the prefix cache."""
        self.num_tied_chunks = 0
        """Leading chunk ends already tied to a block."""
        self.block_size = block_size
        self.root_hash = _root_hash(message.cache_salt) if hash_blocks else None
        self.block_hashes: list[bytes] = []
        self._hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        if len(self.all_token_ids) % self.block_size == 0:
            self._hash_full_blocks()

    def _hash_full_blocks(self) -> None:
        if self.root_hash is None:
            return
        size = self.block_size
        parent = self.block_hashes[-1] if self.block_hashes else self.root_hash
        for start in range(len(self.block_hashes) * size, self.num_tokens - size + 1, size):
            parent = hash_block(parent, self.all_token_ids[start : start + size])
            self.block_hashes.append(parent)


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """SHA-256 over the parent's digest and the tokens as int64: collisions are out of reach even for an attacker who
    chooses the tokens (CVE-2025-25183), so a hit needs no content check."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def _root_hash(cache_salt: str | None) -> bytes:
    """Start of a request's hash chain; tagged and length-prefixed, so that no salt equals another key's bytes."""
    salt = (cache_salt or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"argosy-block/1\0salt" + len(salt).to_bytes(8, "little") + salt).digest()
