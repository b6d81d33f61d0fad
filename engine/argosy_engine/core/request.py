"""Request: the engine core's mutable state of one request, from its arrival to its last token.

With it are what it keeps of its tokens: the hashes of its blocks, and whether they repeat themselves. A block's hash
covers everything that its content depends on. It includes its parent's and so identifies the whole prefix: tokens, the
salt that separates tenants, the adapter whose weights computed it, and the multimodal items behind placeholder tokens.
Salt, adapter and items are tagged and length-prefixed, so that none can be mistaken for another. SHA-256 is collision
resistant even against an attacker who chooses the tokens (CVE-2025-25183), so a hit needs no comparison of content.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from argosy_engine.messages import (
    BlockIds,
    ChunkEnd,
    EngineCoreRequest,
    FinishReason,
    MultimodalFeature,
    PrefillStats,
)
from argosy_engine.params import RepetitionDetectionParams, SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs


def root_hash(cache_salt: str | None, adapter: str | None = None) -> bytes:
    """Return the parent hash of a request's first block."""
    parts = b"argosy-block/2\0" + _part(b"salt", cache_salt or "")
    if adapter is not None:
        parts += _part(b"adapter", adapter)
    return hashlib.sha256(parts).digest()


def hash_block(
    parent: bytes, token_ids: list[int], features: Sequence[MultimodalFeature] = (), start: int = 0
) -> bytes:
    """Hash a full block.

    Args:
        parent: hash of the previous block, or `root_hash`.
        token_ids: the block's tokens.
        features: all multimodal items of the request; those that overlap the block are hashed.
        start: position of the block's first token.
    """
    parts = parent + array("q", token_ids).tobytes()
    for feature in features:
        if feature.offset < start + len(token_ids) and feature.offset + feature.length > start:
            # The offset is hashed too: placeholder tokens do not tell which part of the item falls into this block.
            parts += _part(b"feature", feature.identifier) + (feature.offset - start).to_bytes(
                8, "little", signed=True
            )
    return hashlib.sha256(parts).digest()


def _part(tag: bytes, value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return tag + len(encoded).to_bytes(8, "little") + encoded


_NO_TOKEN = -1


class RepetitionDetector:
    """Detector for one growing sequence.

    Args:
        params: bounds of the pattern; `max_pattern_size` is at least 1.
        token_ids: the sequence so far.
    """

    def __init__(self, params: RepetitionDetectionParams, token_ids: Sequence[int] = ()) -> None:
        self._min_size = max(params.min_pattern_size, 1)
        self._max_size = params.max_pattern_size
        sizes = np.arange(self._min_size, self._max_size + 1)
        self._needed = sizes * (params.min_count - 1)
        self._runs = np.zeros_like(sizes)
        """For each pattern size, how many of the last tokens in a row equal the token `size` positions before."""
        self._recent = np.full(4 * self._max_size, _NO_TOKEN, np.int64)
        """The last tokens, newest first, starting at `_newest`; the buffer fills from its end to its start."""
        self._newest = len(self._recent) - self._max_size
        self._begin(np.array(token_ids[-self._max_size * params.min_count :], np.int64))

    @property
    def is_met(self) -> bool:
        """Whether the sequence ends in a repetition within the bounds of the parameters."""
        return bool((self._runs >= self._needed).any())

    def append(self, token_id: int) -> None:
        if not self._newest:
            self._newest = len(self._recent) - self._max_size
            self._recent[self._newest :] = self._recent[: self._max_size]
        first = self._newest + self._min_size - 1
        self._runs += 1
        self._runs *= self._recent[first : self._newest + self._max_size] == token_id
        self._newest -= 1
        self._recent[self._newest] = token_id

    def _begin(self, tokens: NDArray[np.int64]) -> None:
        """Set the state that appending these tokens one by one would have led to."""
        newest_first = tokens[::-1]
        shown = newest_first[: self._max_size]
        self._recent[self._newest : self._newest + len(shown)] = shown
        for index, size in enumerate(range(self._min_size, min(self._max_size + 1, len(tokens)))):
            is_same = newest_first[:-size] == newest_first[size:]
            self._runs[index] = len(is_same) if is_same.all() else is_same.argmin()


class RequestStatus(IntEnum):
    """What a request waits for, or that it runs or has finished."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    """Blocked: its grammar is being compiled. `Scheduler.unblock` or `Scheduler.fail` ends this status."""
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


BLOCKED = frozenset({RequestStatus.WAITING_FOR_GRAMMAR})
"""Statuses in which a request is not admitted even if there is room."""


class Request:
    """State of a request.

    Its tokens are counted apart: known ones (`num_tokens`), those that steps in flight will sample
    (`num_output_placeholders`), and drafts that the next step verifies (`spec_token_ids`). `num_computed_tokens`
    catches up with the sum of these; it includes the tokens of steps in flight, so that the next step can be planned
    from it.
    """

    __slots__ = (
        "adapter",
        "all_token_ids",
        "arrival_time",
        "batch_offset",
        "block_hashes",
        "block_ids",
        "block_size",
        "call_id",
        "chunk_ends",
        "finish_reason",
        "first_scheduled_at",
        "has_first_token",
        "has_grammar",
        "has_twin_blocks",
        "max_num_tokens",
        "media_bytes",
        "media_end",
        "mm_features",
        "needs_general_path",
        "num_allocated_tokens",
        "num_announced_chunks",
        "num_branch_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_before",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reserved_blocks",
        "num_tokens",
        "pooling_params",
        "priority",
        "prompt_logprobs",
        "queue_key",
        "queued_at",
        "repetition",
        "request_id",
        "root_hash",
        "sampling_params",
        "scores_prompt",
        "spec_token_ids",
        "status",
        "stop_ids",
        "stop_reason",
        "tenant",
        "whole_spans",
    )

    def __init__(self, message: EngineCoreRequest, block_size: int, hash_blocks: bool) -> None:
        self.request_id = message.request_id
        self.sampling_params: SamplingParams = message.sampling_params
        self.pooling_params = message.pooling_params
        self.all_token_ids: list[int] = message.prompt_token_ids + message.resume_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        """Number of known tokens, prompt and output."""
        self.num_output_placeholders = 0
        """Tokens that steps in flight will sample, whose ids are not known yet. Of a step that verifies drafts only the
        drafts are counted, so that the request is not scheduled again before it is known how many are accepted."""
        self.spec_token_ids: list[int] = []
        """Draft tokens, which the next step verifies. They follow the last known token; none is in flight then."""
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.batch_offset = message.batch_offset
        self.call_id = message.call_id
        self.tenant = message.tenant
        self.queue_key = (0, 0, 0)
        """(priority, turn, order of arrival): the lowest is admitted first, the highest is preempted first. Set by
        `WaitingQueue.set_key`."""
        self.chunk_ends: list[ChunkEnd] = message.chunk_ends
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stop_ids: frozenset[int] = frozenset()
        """Token ids that end the request. Set by the scheduler, which knows the model's EOS tokens."""
        self.max_num_tokens = 0
        """Maximum number of prompt and output tokens together. Set by the scheduler."""
        self.has_grammar = message.grammar is not None
        self.has_first_token = False
        """Whether this run of the request has sampled a token; resumed output does not count."""
        params = message.sampling_params
        self.repetition: RepetitionDetector | None = None
        if params.repetition_detection is not None and params.repetition_detection.max_pattern_size:
            self.repetition = RepetitionDetector(params.repetition_detection, message.resume_token_ids)
        self.needs_general_path = params.logprobs is not None or self.repetition is not None
        """Whether its tokens take the general path of `Scheduler.update_from_output`: it asks for log probabilities or
        repetition detection."""
        self.scores_prompt = params.prompt_logprobs is not None
        """Whether it asks for log probabilities of its prompt, which cost more than the prefill itself."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Entries computed so far; sent with the first token."""
        self.num_computed_tokens = 0
        self.num_computed_before = 0
        """Tokens that it had computed when it was last preempted."""
        self.num_cached_tokens = -1
        """Tokens found in the prefix cache when the request was first scheduled; -1 before that."""
        self.num_charged_tokens = 0
        """Tokens, of `num_tokens`, that the tenant has been charged for or got from the cache."""
        self.num_pending_tokens = 0
        """What the request contributes to the scheduler's `queued_uncached_tokens` while it runs."""
        self.num_preemptions = 0
        self.queued_at = time.monotonic()
        self.first_scheduled_at = 0.0
        self.block_ids: BlockIds = []
        """Block table: one list of block ids per KV cache group; empty while the request holds no blocks."""
        self.num_allocated_tokens = 0
        """Number of tokens that fit into the blocks it holds."""
        self.num_reserved_blocks = 0
        """Blocks reserved for its known tokens beyond those that it holds; see `KVCacheManager`."""
        self.num_cached_blocks = 0
        """Number of leading blocks that are registered in the prefix cache."""
        self.has_twin_blocks = False
        """Whether a block that it has computed is registered for another request, which computed the same."""
        self.num_branch_tokens = 0
        """Tokens of its prompt that the attention layers have cached, when they were last asked."""
        self.num_announced_chunks = 0
        """Number of leading chunk ends that are processed: announced where a registered block holds them."""
        self.block_size = block_size
        self.mm_features = message.mm_features
        """In the order of their positions."""
        self.media_end = max((each.offset + each.length for each in message.mm_features), default=0)
        """Tokens up to the end of its last multimodal item."""
        self.media_bytes = sum(each.num_bytes for each in message.mm_features)
        """Of the items' tensors, which are kept until the request ends."""
        self.whole_spans: list[tuple[int, int]] = []
        """Tokens, from a position to one after them, that are computed in one step. Set by the core."""
        self.adapter = message.adapter
        self.root_hash = root_hash(message.cache_salt, message.adapter) if hash_blocks else None
        self.block_hashes: list[bytes] = []
        """Hashes of the full blocks, up to the last call of `hash_full_blocks`."""
        self.hash_full_blocks()

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """Number of known tokens and drafts."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def is_batch(self) -> bool:
        """Whether the request belongs to a call of several prompts."""
        return self.batch_offset > 0

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.num_tokens += 1
        if self.num_output_placeholders:
            self.num_output_placeholders -= 1
        self.spec_token_ids = []  # drafts for this token's position, if it was preempted meanwhile
        if self.repetition is not None:
            self.repetition.append(token_id)

    def check_stop(self, eos_token_ids: frozenset[int]) -> None:
        """Set `finish_reason` and `stop_reason` if the last token ends the request.

        With a grammar, EOS always ends it: before `min_tokens`, EOS is sampled only if the grammar allows nothing else.
        """
        params, token_id = self.sampling_params, self.all_token_ids[-1]
        has_minimum = self.num_output_tokens >= params.min_tokens
        must_end = self.has_grammar and token_id in eos_token_ids
        if must_end or (has_minimum and token_id in self.stop_ids):
            self.finish_reason = FinishReason.STOP
            if params.ignore_eos or token_id not in eos_token_ids:
                self.stop_reason = token_id
        elif self.num_tokens >= self.max_num_tokens:
            self.finish_reason = FinishReason.LENGTH
        elif self.repetition is not None and has_minimum and self.repetition.is_met:
            self.finish_reason, self.stop_reason = FinishReason.REPETITION, "repetition_detected"

    @property
    def has_run(self) -> bool:
        """Whether the request has been admitted before, even if it waits again."""
        return self.num_cached_tokens >= 0

    def prefill_stats(self) -> PrefillStats:
        """Build the statistics of the prefill; call it when the first token arrives."""
        return PrefillStats(
            max(self.num_cached_tokens, 0),
            max(self.first_scheduled_at - self.queued_at, 0.0),
            max(time.monotonic() - self.first_scheduled_at, 0.0),
        )

    def hash_full_blocks(self) -> None:
        """Extend `block_hashes` to all full blocks of known tokens. Does nothing without prefix caching."""
        if self.root_hash is None:
            return
        size, hashes, features = self.block_size, self.block_hashes, self.mm_features
        parent = hashes[-1] if hashes else self.root_hash
        first = last = 0  # of the items of which the block has tokens
        for start in range(len(hashes) * size, self.num_tokens - size + 1, size):
            while first < len(features) and features[first].offset + features[first].length <= start:
                first += 1
            while last < len(features) and features[last].offset < start + size:
                last += 1
            tokens = self.all_token_ids[start : start + size]
            parent = hash_block(parent, tokens, features[first:last], start)
            hashes.append(parent)
