"""Scheduler: which requests compute how many tokens in the next step.

There are no prefill or decode phases: every request has `num_computed_tokens` and tries to catch up with
`num_tokens`, within one token budget per step. Running requests come first, in order; when the KV cache is full the
newest (or least urgent) one is preempted and will be recomputed. Waiting requests are admitted while budget, slots
and blocks last. (vLLM V1, `v1/core/sched/scheduler.py`.)

Knows no tensors, no text, no clients. Invariants: the scheduled tokens of a step never exceed the budget; every
request that was added is answered by exactly one output with a finish reason, unless its client aborted it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.messages import EngineCoreOutput, FinishReason, PrefillStats
from argosy_engine.core.request import Request, RequestStatus
from argosy_engine.worker.step import CachedRequests, ModelRunnerOutput, NewRequest, SchedulerOutput


class Scheduler:
    """
    Args:
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: requests running at once.
        long_prefill_token_threshold: cap on one request's tokens per step while others run; 0 is no cap.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._released: list[str] = []
        """Requests whose worker slots the next step frees."""
        self._failed: list[EngineCoreOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._failed)

    @property
    def queued_uncached_tokens(self) -> int:
        """Prompt tokens that admitted and waiting requests still have to compute."""
        pending = sum(request.num_tokens for request in self.waiting)
        return pending + sum(
            max(request.num_prompt_tokens - request.num_computed_tokens, 0) for request in self.running
        )

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests whose client is gone; unknown ids are fine (they finished meanwhile)."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                if request.status is RequestStatus.RUNNING:
                    self.running.remove(request)
                else:
                    self.waiting.remove(request)
                self._finish(request, FinishReason.ABORT)

    # One step

    def schedule(self) -> SchedulerOutput:
        scheduled: dict[str, int] = {}
        new_requests: list[NewRequest] = []
        cached = CachedRequests([], [], [])
        budget = self.max_num_batched_tokens
        preempted = False

        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new = self._num_new_tokens(request, budget)
            new_block_ids = self.kv.grow(request, num_new)
            while new_block_ids is None:
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
                new_block_ids = self.kv.grow(request, num_new)
            if new_block_ids is None:
                break  # the request preempted itself: it was the last
            scheduled[request.request_id] = num_new
            cached.request_ids.append(request.request_id)
            cached.new_block_ids.append(new_block_ids)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            budget -= num_new
            index += 1

        while self.waiting and not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            admitted = self._admit(request, budget)
            if admitted is None:
                if not self.running and not scheduled:
                    # Nothing runs, so nothing will ever make room: an answer beats a livelock.
                    self._fail_head()
                    continue
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            scheduled[request.request_id] = admitted
            budget -= admitted
            new_requests.append(
                NewRequest(
                    request.request_id,
                    list(request.all_token_ids),
                    list(request.block_ids),
                    request.num_computed_tokens,
                    request.sampling_params,
                )
            )

        total = self.max_num_batched_tokens - budget
        assert total == sum(scheduled.values())
        released, self._released = self._released, []
        return SchedulerOutput(new_requests, cached, scheduled, total, released)

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        num_new = request.num_tokens - request.num_computed_tokens
        threshold = self.long_prefill_token_threshold
        if threshold and num_new > threshold and len(self.requests) > 1:
            num_new = threshold
        return min(num_new, budget)

    def _admit(self, request: Request, budget: int) -> int | None:
        """Gives the request blocks; the tokens it may compute in this step, or None when it must wait."""
        cached_block_ids = self.kv.find_cached_prefix(request)
        request.num_computed_tokens = len(cached_block_ids) * self.kv.block_size
        num_new = self._num_new_tokens(request, budget)
        wanted = request.num_tokens - request.num_computed_tokens
        if num_new < wanted and not self.enable_chunked_prefill and self.running:
            return None
        if self.kv.admit(request, cached_block_ids, num_new) is None:
            return None
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            request.first_scheduled_at = time.monotonic()
        return num_new

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._released.append(request.request_id)
        self.waiting.appendleft(request)

    def _fail_head(self) -> None:
        request = self.waiting.popleft()
        self._failed.append(
            EngineCoreOutput(
                request.request_id,
                [],
                FinishReason.ERROR,
                error=f"the request's {request.num_tokens} tokens do not fit into the KV cache of "
                f"{(len(self.kv.pool.blocks) - 1) * self.kv.block_size} tokens",
            )
        )
        self._finish(request, FinishReason.ERROR)

    # What came out of it

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Books a finished step: advances requests, appends tokens, stops what is done."""
        outputs, self._failed = self._failed, []
        stopped: set[str] = set()
        for request_id, token_ids in zip(result.request_ids, result.sampled_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            request.num_computed_tokens += step.num_scheduled_tokens[request_id]
            self.kv.cache_computed_blocks(request)
            if not token_ids:
                continue
            is_first = request.num_output_tokens == 0
            kept = self._append_until_stop(request, token_ids)
            output = EngineCoreOutput(request_id, kept, request.finish_reason, request.stop_reason)
            if is_first:
                output.prefill_stats = self._prefill_stats(request)
            if request.finish_reason is not None:
                output.num_preemptions = request.num_preemptions
                stopped.add(request_id)
                self._finish(request, request.finish_reason)
            outputs.append(output)
        if stopped:
            self.running = [request for request in self.running if request.request_id not in stopped]
        return outputs

    def _append_until_stop(self, request: Request, token_ids: list[int]) -> list[int]:
        for position, token_id in enumerate(token_ids):
            request.append_output(token_id)
            self._check_stop(request, token_id)
            if request.finish_reason is not None:
                return token_ids[: position + 1]
        return token_ids

    def _check_stop(self, request: Request, token_id: int) -> None:
        params = request.sampling_params
        if token_id in self.eos_token_ids and not params.ignore_eos:
            request.finish_reason = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            request.finish_reason, request.stop_reason = FinishReason.STOP, token_id
        elif request.num_tokens >= self.max_model_len or (
            params.max_tokens is not None and request.num_output_tokens >= params.max_tokens
        ):
            request.finish_reason = FinishReason.LENGTH

    def _prefill_stats(self, request: Request) -> PrefillStats:
        now = time.monotonic()
        return PrefillStats(
            max(request.num_cached_tokens, 0),
            max(request.first_scheduled_at - request.queued_at, 0.0),
            max(now - request.first_scheduled_at, 0.0),
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Frees everything a request holds; the caller has taken it out of `running` or `waiting`."""
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.kv.free(request)
        del self.requests[request.request_id]
        self._released.append(request.request_id)

    def check(self) -> None:
        """Asserts the invariants; for tests and the idle engine."""
        self.kv.pool.check()
        assert len(self.requests) == len(self.running) + len(self.waiting)
        held = sum(len(request.block_ids) for request in self.requests.values())
        referenced = sum(block.ref_count for block in self.kv.pool.blocks[1:])
        assert held == referenced, f"requests hold {held} blocks, the pool counts {referenced}"
        assert all(not request.block_ids for request in self.waiting)
