"""Request: the core's view of one generation, from admission to its last token."""

from __future__ import annotations

import time
from enum import IntEnum

from argosy_engine.core.block_hash import hash_block, root_hash
from argosy_engine.core.messages import ChunkEnd, EngineCoreRequest, FinishReason, PrefillStats
from argosy_engine.core.repetition import RepetitionDetector
from argosy_engine.sample.params import SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.worker.step import BlockIds


class RequestStatus(IntEnum):
    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    """Blocked: its grammar is being compiled. `Scheduler.unblock` or `Scheduler.fail` ends it."""
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


BLOCKED = frozenset({RequestStatus.WAITING_FOR_GRAMMAR})
"""What keeps a request from being admitted although there may be room."""


class Request:
    """Mutable state of a request. `num_computed_tokens` chases `num_tokens_with_spec`; there are no phases.

    `num_computed_tokens` counts the tokens of every step that was scheduled, so the next step can be planned from it.
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
        "has_extras",
        "has_first_token",
        "has_grammar",
        "max_num_tokens",
        "mm_features",
        "num_allocated_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_promised_blocks",
        "num_prompt_tokens",
        "num_tied_chunks",
        "num_tokens",
        "num_tokens_with_spec",
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
    )

    def __init__(self, message: EngineCoreRequest, block_size: int, hash_blocks: bool) -> None:
        self.request_id = message.request_id
        self.sampling_params: SamplingParams = message.sampling_params
        self.pooling_params = message.pooling_params
        self.all_token_ids: list[int] = message.prompt_token_ids + message.resume_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        """Known tokens: prompt and output."""
        self.num_tokens_with_spec = self.num_tokens
        """Known tokens, tokens that steps in flight will give, and drafts."""
        self.spec_token_ids: list[int] = []
        """Drafts: guesses at the next tokens, which the next step verifies."""
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.batch_offset = message.batch_offset
        self.call_id = message.call_id
        self.queue_key = (0, 0, 0)
        """(urgency, turn, order of arrival): lower goes first, higher is preempted first. Set by the scheduler."""
        self.chunk_ends: list[ChunkEnd] = message.chunk_ends
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.stop_ids: frozenset[int] = frozenset()
        """Tokens that end the request. Set by the scheduler, which knows the model's EOS."""
        self.max_num_tokens = 0
        """Prompt and output together end here. Set by the scheduler."""
        self.has_grammar = message.grammar is not None
        self.has_first_token = False
        """Whether this run of the request gave a token; output that it continues does not count."""
        params = message.sampling_params
        self.repetition: RepetitionDetector | None = None
        if params.repetition_detection is not None and params.repetition_detection.max_pattern_size:
            self.repetition = RepetitionDetector(params.repetition_detection, message.resume_token_ids)
        self.has_extras = params.logprobs is not None or self.repetition is not None
        """Whether each of its tokens takes more than appending it."""
        self.scores_prompt = params.prompt_logprobs is not None
        """Whether its prompt's tokens take log probabilities, which cost more than computing them."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """So far; sent with the first token."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        """Prompt tokens found in the prefix cache at first schedule; -1 before."""
        self.num_pending_tokens = 0
        """The request's part of the scheduler's `queued_uncached_tokens` while it runs."""
        self.num_preemptions = 0
        self.queued_at = time.monotonic()
        self.first_scheduled_at = 0.0
        self.block_ids: BlockIds = []
        """Per KV cache group; empty while the request holds no blocks."""
        self.num_allocated_tokens = 0
        """Tokens that the blocks held now have room for."""
        self.num_promised_blocks = 0
        """Blocks that its known tokens will take beyond those it holds; see `KVCacheManager`."""
        self.num_cached_blocks = 0
        """Leading blocks whose content is registered in the prefix cache."""
        self.num_tied_chunks = 0
        """Leading chunk ends already tied to a block."""
        self.block_size = block_size
        self.mm_features = message.mm_features
        self.adapter = message.adapter
        self.root_hash = root_hash(message.cache_salt, message.adapter) if hash_blocks else None
        self.block_hashes: list[bytes] = []
        """Of the full blocks, as far as someone asked (`hash_full_blocks`)."""
        self.hash_full_blocks()

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_batch(self) -> bool:
        """Whether its call has other prompts."""
        return self.batch_offset > 0

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.num_tokens += 1
        self.num_tokens_with_spec = max(self.num_tokens_with_spec, self.num_tokens)
        if self.repetition is not None:
            self.repetition.append(token_id)

    def check_stop(self, eos_token_ids: frozenset[int]) -> None:
        """Sets `finish_reason` and `stop_reason` if the last token ends the request. With a grammar EOS always does: it
        comes before `min_tokens` only when the grammar allows nothing else."""
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

    def prefill_stats(self) -> PrefillStats:
        """Of a request whose first token has just come."""
        return PrefillStats(
            max(self.num_cached_tokens, 0),
            max(self.first_scheduled_at - self.queued_at, 0.0),
            max(time.monotonic() - self.first_scheduled_at, 0.0),
        )

    def hash_full_blocks(self) -> None:
        """Brings `block_hashes` up to the known tokens; does nothing without prefix caching."""
        if self.root_hash is None:
            return
        size, hashes = self.block_size, self.block_hashes
        parent = hashes[-1] if hashes else self.root_hash
        for start in range(len(hashes) * size, self.num_tokens - size + 1, size):
            parent = hash_block(parent, self.all_token_ids[start : start + size], self.mm_features, start)
            hashes.append(parent)
