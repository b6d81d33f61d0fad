"""Scheduler: decides which requests compute how many tokens in the next step.

There are no prefill or decode phases: every request has `num_computed_tokens`, which catches up with its known tokens,
drafts and placeholders (`Request`) within one token budget per step. Running requests are scheduled first, in order;
when the KV cache is full, the scheduler preempts the least urgent of them (among equals the newest), which is
recomputed later. Waiting requests are then admitted, most urgent first, as long as token budget, slots and blocks last.
Tenants take turns with one another, and the prompts of a batch with other calls (`WaitingQueue`). When no slot is free,
a call with many running sequences yields at most one slot per step to another call, and the least urgent running
request its slot to a more urgent one (`MAX_PREEMPTIONS_FOR_SLOTS`). Design: vLLM V1,
`v1/core/sched/scheduler.py`.

With async scheduling the next step is scheduled before the output of the last one is processed. A step that samples for
a request yields at least one token, which is scheduled as a placeholder before its id is known. A request is not
scheduled while a token in flight may be its last by length, while its drafts are being verified, or, once preempted,
until its steps in flight have ended.

With pipeline parallelism as many steps are in flight as there are stages. A step takes its share of the running
requests, those that were scheduled least recently first, and none whose next token is still in flight.

The scheduler knows no tensors, no text and no clients. Invariants: the scheduled tokens of a step never exceed the
budget; every added request is answered by exactly one output with a finish reason, unless its client aborted it.

Decoding a token that fits into the blocks already held is the common case and takes a fast path in `schedule` and
`update_from_output`. Everything else, including a decode that needs a new block, takes the general path.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec.structs import replace

from argosy_engine.core.encoder_cache import EncoderCacheManager
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import BLOCKED, Request, RequestStatus
from argosy_engine.core.steps import StepPlan, StepsInFlight
from argosy_engine.core.waiting_queue import WaitingQueue
from argosy_engine.fair_shares import TenantShares
from argosy_engine.messages import (
    EngineCoreOutput,
    ErrorKind,
    FinishReason,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from argosy_engine.sample.token_logprobs import TokenLogprobs

SchedulingPolicy = Literal["fcfs", "priority"]

MAX_PREEMPTIONS_FOR_SLOTS = 8
"""A request that was preempted so often keeps its slot until it ends, whatever is more urgent: it is computed anew each
time, and would otherwise never end under steady urgent load."""


class Scheduler:
    """Plans steps over running and waiting requests, and processes their outputs.

    Args:
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: maximum number of running requests.
        eos_token_ids: tokens that end a request unless it sets `ignore_eos`.
        long_prefill_token_threshold: cap on one request's prefill tokens per step while there are other requests; 0
            means no cap.
        max_num_mixed_prefill_tokens: cap on the prefill tokens of a step while a request decodes, because they delay
            its next token; None means no cap.
        policy: `fcfs` ignores the requests' priority.
        pipeline_parallel_size: number of stages; with more than one, steps carry the tokens that the first computes.

    Multimodal items are encoded in the step of the first chunk that has some of their tokens (`_encode`).
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
        max_num_mixed_prefill_tokens: int | None = None,
        policy: SchedulingPolicy = "fcfs",
        pipeline_parallel_size: int = 1,
    ) -> None:
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_num_mixed_prefill_tokens = max_num_mixed_prefill_tokens or max_num_batched_tokens
        self.policy = policy
        self.pipeline_parallel_size = pipeline_parallel_size
        self.encoder_cache = EncoderCacheManager(max(max_num_batched_tokens, max_model_len))
        """No prompt has more placeholders than its context, so that what one request holds always fits."""
        self.media_bytes = TenantShares(0)
        """Of the tensors of all unfinished requests' multimodal items."""
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(max_num_seqs)
        self.blocked: dict[str, Request] = {}
        """Requests that wait for something other than capacity; `schedule` does not look at them."""
        self.running: list[Request] = []
        """In the order of admission; with pipeline parallelism those that were scheduled least recently first."""
        self.in_flight = StepsInFlight()
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        """Tokens of preempted requests that were computed before and not found in the prefix cache."""
        self._num_pending_tokens = 0
        """Sum of `num_pending_tokens` over the running requests."""
        self._released: list[str] = []
        """Ids of requests whose worker slots the next step frees."""
        self._outputs: list[EngineCoreOutput] = []
        """Outputs that the next `update_from_output` returns."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something. Blocked requests do not count as work."""
        return bool(self.running or self.waiting or self._outputs)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request, including a blocked one, is still unanswered."""
        return bool(self.requests or self._outputs)

    @property
    def queued_uncached_tokens(self) -> int:
        """Tokens that running, waiting and blocked requests must compute before their next output token. For requests
        that are not admitted, tokens in the prefix cache are not counted."""
        return self._num_pending_tokens + self.kv.waiting.num_tokens

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.blocked)

    def add(self, request: Request) -> None:
        """Queue a request; one with a blocked status (`WAITING_FOR_GRAMMAR`) is kept apart until `unblock`.

        Raises:
            ValueError: an unfinished request has this id.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        params = request.sampling_params
        stop_ids = self.eos_token_ids if not params.ignore_eos else frozenset()
        request.stop_ids = stop_ids.union(params.stop_token_ids)
        request.max_num_tokens = self.max_model_len
        if params.max_tokens is not None:
            request.max_num_tokens = min(self.max_model_len, request.num_prompt_tokens + params.max_tokens)
        self.waiting.set_key(request, request.priority if self.policy == "priority" else 0)
        if request.num_output_tokens:
            request.check_stop(self.eos_token_ids)
            if request.finish_reason is not None:  # the run that it resumes had already finished
                self._outputs.append(
                    EngineCoreOutput(request.request_id, [], request.finish_reason, request.stop_reason)
                )
                return
        self._enqueue(request)

    def unblock(self, request_id: str) -> None:
        """Move a blocked request to the waiting queue, at the place of its arrival. Unknown ids are ignored."""
        request = self.blocked.pop(request_id, None)
        if request is not None:
            request.status = RequestStatus.WAITING
            self.waiting.push(request)

    def block(self, request_id: str) -> None:
        """Take a request that waits for its first slot out of the waiting queue until `unblock`. Others are ignored."""
        request = self.requests.get(request_id)
        if request is not None and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self.waiting.remove(request)
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            self.blocked[request_id] = request

    def fail(self, request_id: str, reason: str, kind: ErrorKind = ErrorKind.INVALID) -> None:
        """End a request with an error, which the next `update_from_output` returns. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            request.finish_reason = FinishReason.ERROR
            self._outputs.append(
                EngineCoreOutput(request_id, [], FinishReason.ERROR, error=reason, error_kind=kind)
            )
            self._remove(request)
            self._finish(request, FinishReason.ERROR)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests whose client is gone. Unknown ids are ignored: those requests have finished meanwhile."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._remove(request)
                self._finish(request, FinishReason.ABORT)

    def forget_released(self) -> None:
        """Drop the list of slots to free; the worker has dropped all requests and has none left."""
        self._released = []

    def _enqueue(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if request.media_bytes:
            self.media_bytes.add(request.tenant, request.media_bytes)
        self.kv.enqueue(request)
        if request.status in BLOCKED:
            self.blocked[request.request_id] = request
        else:
            self.waiting.push(request)

    # Scheduling

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, which is in flight from then on.

        Call `update_from_output` for every step, in the same order.
        """
        favoured = None
        if len(self.running) >= self.max_num_seqs:
            favoured = self._preempt_for_priority() or self._preempt_for_fair_share()
        is_mixed = self.enable_chunked_prefill and any(request.has_first_token for request in self.running)
        prefill_budget = self.max_num_mixed_prefill_tokens if is_mixed else self.max_num_batched_tokens
        plan = StepPlan(
            self.max_num_batched_tokens,
            prefill_budget,
            self.long_prefill_token_threshold if len(self.requests) > 1 else 0,
            self.max_num_batched_tokens,
        )
        num_preemptions = self.num_preemptions
        self._schedule_running(plan)
        if num_preemptions == self.num_preemptions:
            self._schedule_waiting(plan, favoured)
        assert plan.token_budget >= 0
        released, self._released = self._released, []
        if plan.num_scheduled_tokens:
            dropped = self.encoder_cache.end_step()
        else:  # workers neither encode nor drop without tokens
            self.encoder_cache.cancel_step([each.identifier for each in plan.encoder_inputs])
            plan.encoder_inputs, dropped = [], []
        step = plan.step(released, dropped)
        if self.pipeline_parallel_size > 1:
            step.new_token_ids = self._new_token_ids(plan)
            self.running.sort(key=lambda request: request.request_id in plan.num_scheduled_tokens)
        if step.num_scheduled_tokens:
            self.in_flight.push(step)
        return step

    def _preempt_for_priority(self) -> Request | None:
        """Preempt the least urgent running request (among equals the newest) for a waiting one that is more urgent.

        The request that loses its slot is less urgent than the one that gets it, so it never gets it back by this
        rule: there are at most as many preemptions as arrivals.

        Returns the request that gets the slot, or None.
        """
        if self.policy != "priority":
            return None
        urgent = self.waiting.peek()
        if urgent is None or urgent.request_id in self.in_flight:
            return None
        victim = max(
            (each for each in self.running if each.num_preemptions < MAX_PREEMPTIONS_FOR_SLOTS),
            key=lambda each: each.queue_key,
            default=None,
        )
        if victim is None or victim.queue_key[0] <= urgent.queue_key[0]:
            return None
        self.running.remove(victim)
        self._preempt(victim, victim.num_computed_tokens)
        return urgent

    def _preempt_for_fair_share(self) -> Request | None:
        """Preempt a sequence of a call with many slots for a waiting request that is entitled to one.

        Returns the request that gets the slot, or None.
        """
        displacement = self.waiting.displacement()
        if displacement is None or displacement[0].request_id in self.in_flight:
            return None
        favoured, victim = displacement
        self.running.remove(victim)
        self._preempt(victim, victim.num_computed_tokens)
        return favoured

    def _schedule_running(self, plan: StepPlan) -> None:
        num_preemptions = self.num_preemptions
        scheduled = plan.num_scheduled_tokens
        for request in self.running if self.pipeline_parallel_size == 1 else self._share_of_stage(plan):
            if plan.token_budget <= 0:
                break
            num_computed = request.num_computed_tokens + 1
            if (
                num_computed == request.num_tokens + request.num_output_placeholders
                and not request.spec_token_ids
                and request.media_end < num_computed <= request.num_allocated_tokens
                and num_computed < request.max_num_tokens - 1
            ):
                request.num_computed_tokens = num_computed
                request.num_output_placeholders += 1
                scheduled[request.request_id] = 1
                plan.token_budget -= 1
            elif request.status is RequestStatus.RUNNING:  # not if this loop has preempted it
                self._extend(request, plan)
        if num_preemptions != self.num_preemptions:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]

    def _share_of_stage(self, plan: StepPlan) -> Iterator[Request]:
        """Yield running requests until a pipeline's next step has its share, so that all stages compute as much.

        Those that were scheduled least recently come first, so that none is left out for more steps than there are
        requests.
        """
        most = -(-len(self.running) // self.pipeline_parallel_size)
        for request in self.running:
            if len(plan.num_scheduled_tokens) >= most:
                return
            if not request.num_output_placeholders:
                yield request

    def _new_token_ids(self, plan: StepPlan) -> dict[str, int]:
        """Return the tokens that the step computes of requests whose other tokens the workers know."""
        new = {request.request_id for request in plan.new_requests}
        token_ids = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            if count == 1 and request_id not in new:
                request = self.requests[request_id]
                token_ids[request_id] = request.all_token_ids[request.num_computed_tokens - 1]
        return token_ids

    def _extend(self, request: Request, plan: StepPlan) -> None:
        """Schedule tokens of a running request and allocate their blocks, preempting requests to make room."""
        num_wanted = (
            request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        )
        num_new = plan.limit(
            self._cap(request, num_wanted, plan), len(request.spec_token_ids), is_batch=request.is_batch
        )
        if num_new == 0:
            return  # waits for its steps in flight, or for prefill budget
        num_new = self._chunk(request, request.num_computed_tokens, num_new)
        num_new = self._encode(request, request.num_computed_tokens, num_new, plan)
        if num_new == 0:
            return  # waits for room in the encoder's budget or cache
        while (block_ids := self.kv.grow(request, num_new)) is None:
            victim = max(
                (r for r in self.running if r.status is RequestStatus.RUNNING), key=lambda r: r.queue_key
            )
            self._preempt(victim, victim.num_computed_tokens - plan.drop(victim.request_id))
            if victim is request:
                return
        if block_ids:
            plan.new_block_ids[request.request_id] = block_ids
        num_drafts = 0
        if request.spec_token_ids:
            num_drafts = max(request.num_computed_tokens + num_new - request.num_tokens, 0)
            if num_drafts:
                plan.drafts[request.request_id] = request.spec_token_ids[:num_drafts]
        self._advance(request, num_new)
        plan.add(request.request_id, num_new, num_drafts, is_batch=request.is_batch)

    def _schedule_waiting(self, plan: StepPlan, favoured: Request | None) -> None:
        """Admit waiting requests in order until one does not fit; the favoured request goes first."""
        while plan.token_budget > 0 and len(self.running) < self.max_num_seqs:
            request, favoured = favoured or self.waiting.peek(), None
            if request is None or request.request_id in self.in_flight:
                break
            num_new = self._admit(request, plan)
            if num_new is None:
                if self.running:
                    break
                # Nothing runs, so no room will ever be made: fail the request instead of retrying for ever.
                self.fail(
                    request.request_id,
                    f"the request's {request.num_tokens} tokens do not fit into the KV cache of "
                    f"{self.kv.num_blocks} blocks of {self.kv.block_size} tokens",
                )
                continue
            self.waiting.remove(request)
            self.kv.dequeue(request)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self.waiting.take_slot(request)
            plan.new_requests.append(
                NewRequest(
                    request.request_id,
                    list(request.all_token_ids),
                    [list(block_ids) for block_ids in request.block_ids],
                    request.num_computed_tokens,
                    request.sampling_params,
                    request.num_output_tokens,
                    request.pooling_params,
                    request.adapter,
                    [replace(feature, inputs={}) for feature in request.mm_features],
                )
            )
            self._advance(request, num_new)
            plan.add(request.request_id, num_new, is_batch=request.is_batch)

    def _admit(self, request: Request, plan: StepPlan) -> int | None:
        """Allocate a waiting request's blocks; return how many tokens it computes now, or None if it must wait."""
        cached_block_ids = self.kv.find_cached_prefix(request)
        num_cached = len(cached_block_ids[0]) * self.kv.block_size
        num_wanted = request.num_tokens - num_cached
        num_new = plan.limit(self._cap(request, num_wanted, plan), is_batch=request.is_batch)
        if num_new == 0 or (num_new < num_wanted and not self.enable_chunked_prefill and self.running):
            return None
        num_new = self._encode(request, num_cached, self._chunk(request, num_cached, num_new), plan)
        if num_new == 0 or not self.kv.admit(
            request, cached_block_ids, num_new, apply_watermark=bool(self.running)
        ):
            self.encoder_cache.leave_all(request.request_id)
            return None
        request.num_computed_tokens = num_cached
        if request.has_run:
            self.num_recomputed_tokens += max(request.num_computed_before - num_cached, 0)
        else:
            self.waiting.admit(request, request.num_tokens - num_cached)
            request.num_charged_tokens = request.num_tokens
            request.num_cached_tokens = num_cached
            request.first_scheduled_at = time.monotonic()
        return num_new

    def _cap(self, request: Request, num_wanted: int, plan: StepPlan) -> int:
        """Limit the tokens that a request asks for, and with them the prefill budget of batches in this step.

        A prompt with log probabilities is computed in chunks that do not delay a decode for long, because one may
        begin in the next step. While a call of one prompt waits for its first token, batches get at most half of the
        step's prefill tokens.
        """
        if num_wanted == 1 or not self.enable_chunked_prefill:
            return num_wanted
        if request.is_batch and plan.batch_prefill_budget is None and self._is_awaited_by_others():
            plan.batch_prefill_budget = plan.prefill_budget // 2
        if request.scores_prompt:
            return min(num_wanted, self.max_num_mixed_prefill_tokens)
        return num_wanted

    def _chunk(self, request: Request, start: int, num_new: int) -> int:
        """Return how many of the tokens that a request may compute from `start` it does, so that its step ends where
        its state is to be kept."""
        if not self.enable_chunked_prefill:
            return num_new
        return self.kv.chunk_end(request, start, start + num_new) - start

    def _encode(self, request: Request, start: int, num_new: int, plan: StepPlan) -> int:
        """Let the step encode the multimodal items of which it computes tokens, unless their outputs are there.

        Returns:
            how many of the `num_new` tokens from `start` on the step may compute: those before the first item for which
            there is no room.
        """
        if request.media_end <= start:
            return num_new
        num_new = self._whole(request, start, num_new, plan)
        if not num_new:
            return 0
        for feature in request.mm_features:
            if feature.offset >= start + num_new:
                break
            if feature.offset + feature.length <= start or not feature.num_embeds:
                continue
            if feature.identifier not in self.encoder_cache and not (
                plan.may_encode(feature) and self.encoder_cache.has_room(feature.num_embeds)
            ):
                return max(feature.offset - start, 0)
            if self.encoder_cache.hold(request.request_id, feature):
                plan.encode(feature)
        return num_new

    def _whole(self, request: Request, start: int, num_new: int, plan: StepPlan) -> int:
        """Return how many of the `num_new` tokens from `start` on a step may compute such that it computes each of
        `Request.whole_spans` as a whole: more, if it begins with one and the step has room for all of it, or fewer.

        What of a span is cached was computed together with the rest.
        """
        for first, end in request.whole_spans:
            if first < start + num_new < end:
                wanted = end - start
                return wanted if first <= start and wanted <= plan.token_budget else max(first - start, 0)
        return num_new

    def _leave_encoded(self, request: Request) -> None:
        """Let a request no longer hold items whose tokens are all computed, or scheduled."""
        done = request.num_computed_tokens
        begun = {
            each.identifier for each in request.mm_features if each.offset < done < each.offset + each.length
        }
        for feature in request.mm_features:
            if feature.offset + feature.length <= done and feature.identifier not in begun:
                self.encoder_cache.leave(request.request_id, feature.identifier)

    def _is_awaited_by_others(self) -> bool:
        """Whether a call of one prompt, running or at the head of the queue, waits for its first token."""
        first = self.waiting.peek()
        if first is not None and not first.is_batch:
            return True
        return any(not request.has_first_token and not request.is_batch for request in self.running)

    def _advance(self, request: Request, num_new: int) -> None:
        """Count scheduled tokens as computed, and add placeholders for the tokens that this step will sample."""
        has_media = request.media_end > request.num_computed_tokens
        request.num_computed_tokens = num_computed = request.num_computed_tokens + num_new
        if has_media:
            self._leave_encoded(request)
        num_target = request.num_tokens_with_spec + request.num_output_placeholders
        self._set_pending(request, num_target - num_computed)
        if request.spec_token_ids and num_computed >= request.num_tokens:
            # The step verifies these drafts. Those that did not fit into it are dropped.
            request.spec_token_ids = []
            request.num_output_placeholders = num_computed - request.num_tokens
        elif num_computed == num_target and num_computed < request.max_num_tokens - 1:
            request.num_output_placeholders += 1

    def _preempt(self, request: Request, num_computed_tokens: int) -> None:
        """Free a running request's blocks and queue it again. The caller removes it from `running`.

        Args:
            num_computed_tokens: without the tokens that the step being planned would have computed.
        """
        self.kv.free(request, num_computed_tokens)
        self.encoder_cache.leave_all(request.request_id)
        request.num_computed_before, request.num_computed_tokens = num_computed_tokens, 0
        self._set_drafts(request, [])
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._set_pending(request, 0)
        self.kv.enqueue(request)
        self.num_preemptions += 1
        self._released.append(request.request_id)
        self._charge_output(request)
        self.waiting.release_slot(request)
        self.waiting.push(request)

    # Step outputs

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Process the output of a finished step: append its tokens and finish the requests that are done.

        If it raises, the outputs collected so far are kept and returned by the call after `rebuild`.
        """
        outputs, requests = self._outputs, self.requests
        stale = self.in_flight.pop(step) if step.num_scheduled_tokens else ()
        drafts = step.scheduled_spec_token_ids
        has_stopped = False
        for request_id, (start, entries) in result.prompt_logprobs.items():
            if request_id in requests and request_id not in stale:
                requests[request_id].prompt_logprobs[start:] = entries
        for request_id, token_ids in zip(result.request_ids, result.sampled_token_ids, strict=True):
            if not token_ids:
                continue  # its prefill is not finished
            request = requests.get(request_id)
            if request is None or request_id in stale:
                continue  # it ended while the step ran
            token_id = token_ids[0]
            num_tokens = request.num_tokens + 1
            if (
                num_tokens < request.max_num_tokens
                and token_id not in request.stop_ids
                and request.has_first_token
                and not request.needs_general_path
                and request.num_output_placeholders  # not preempted meanwhile
                and request_id not in drafts
            ):
                request.all_token_ids.append(token_id)
                request.num_tokens = num_tokens
                request.num_output_placeholders -= 1
                outputs.append(EngineCoreOutput(request_id, token_ids))
                continue
            outputs.append(
                self._update_request_with_output(request, token_ids, result.logprobs.get(request_id))
            )
            if request_id in drafts:  # rejected drafts were not computed
                request.num_output_placeholders = 0
                request.num_computed_tokens = request.num_tokens - 1
            if request_id in result.pooler_output:
                # The sampled token only carries the vector and is not an output.
                outputs[-1].pooling_output = result.pooler_output[request_id]
                outputs[-1].new_token_ids, outputs[-1].finish_reason = [], FinishReason.STOP
            if request.finish_reason is not None:
                if request.status is RequestStatus.RUNNING:
                    has_stopped = True
                else:  # preempted while its last token was in flight
                    self._remove(request)
                self._finish(request, request.finish_reason)
        if has_stopped:
            self.running = [request for request in self.running if not request.is_finished]
        for request_id, token_ids in result.draft_token_ids.items():
            request = requests.get(request_id)
            if request is not None and request.num_computed_tokens < request.num_tokens:
                # Keep the last position below the limit for the token that is sampled after the drafts.
                self._set_drafts(request, token_ids[: request.max_num_tokens - request.num_tokens - 1])
        self._outputs = []
        return outputs

    def _update_request_with_output(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineCoreOutput:
        """Append tokens up to the one that ends the request, and build the output."""
        for position, token_id in enumerate(token_ids):
            request.append_output(token_id)
            request.check_stop(self.eos_token_ids)
            if request.finish_reason is not None:
                token_ids = token_ids[: position + 1]
                break
        output = EngineCoreOutput(request.request_id, token_ids, request.finish_reason, request.stop_reason)
        if not request.has_first_token:
            request.has_first_token = True
            output.prefill_stats = request.prefill_stats()
            if request.prompt_logprobs:
                output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        if logprobs is not None:
            output.logprobs = logprobs[: len(token_ids)]
        output.num_preemptions = request.num_preemptions
        return output

    def _remove(self, request: Request) -> None:
        """Remove an unfinished request from the collection for its status."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            return
        self.kv.dequeue(request)
        if request.status in BLOCKED:
            del self.blocked[request.request_id]
        else:
            self.waiting.remove(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Free everything that a request holds. The caller removes it from its collection."""
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        if request.media_bytes:
            self.media_bytes.remove(request.tenant, request.media_bytes)
        self._set_pending(request, 0)
        self._released.append(request.request_id)
        self._charge_output(request)
        self.waiting.release_slot(request)
        self.in_flight.forget(request.request_id)
        self.encoder_cache.leave_all(request.request_id)
        self.kv.free(request, request.num_computed_tokens)

    def _charge_output(self, request: Request) -> None:
        """Charge the tenant of a request that stops running for the tokens sampled since it was last charged."""
        if request.has_run and request.num_tokens > request.num_charged_tokens:
            self.waiting.charge(request.tenant, request.num_tokens - request.num_charged_tokens)
            request.num_charged_tokens = request.num_tokens

    def _set_drafts(self, request: Request, token_ids: list[int]) -> None:
        """Set the drafts of a request that no step in flight counts on."""
        request.spec_token_ids = token_ids
        request.num_output_placeholders = 0

    def _set_pending(self, request: Request, num_tokens: int) -> None:
        self._num_pending_tokens += num_tokens - request.num_pending_tokens
        request.num_pending_tokens = num_tokens

    # Recovery and checks

    def rebuild(self, error: str | None = None) -> None:
        """Recover from a violated invariant: empty the KV cache and queue every unfinished request for recomputation.

        Relies on `requests` only, because any other state may be wrong; except for the tenants' counters, which affect
        no more than the order of turns.

        Args:
            error: if given, end the requests with this error instead.
        """
        self.kv.rebuild()
        self.encoder_cache.reset()
        # The worker may never have received one of these steps; freeing a slot twice is harmless.
        self._released += self.in_flight.forget_all()
        unanswered = [request for request in self.requests.values() if request.finish_reason is None]
        self._released += self.requests
        previous = self.waiting
        self.requests, self.waiting, self.blocked, self.running = {}, WaitingQueue(self.max_num_seqs), {}, []
        self._num_pending_tokens, self.media_bytes = 0, TenantShares(0)
        for request in unanswered:
            self.kv.forget(request)
            request.num_computed_before = request.num_computed_tokens
            request.num_computed_tokens = request.num_pending_tokens = 0
            self._set_drafts(request, [])
            if error is not None:
                request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ERROR
                self._outputs.append(
                    EngineCoreOutput(
                        request.request_id,
                        [],
                        FinishReason.ERROR,
                        error=error,
                        error_kind=ErrorKind.INTERNAL,
                    )
                )
                continue
            if request.status not in BLOCKED:
                request.status = RequestStatus.PREEMPTED
            self._enqueue(request)
        self.waiting.restore(previous)
        for request in unanswered:
            self._charge_output(request)

    def check(self) -> None:
        """Assert the invariants. O(requests + blocks); for tests and the idle engine."""
        self.kv.check(self.requests.values())
        self.encoder_cache.check({request.request_id for request in self.running})
        assert len(self.requests) == len(self.running) + len(self.waiting) + len(self.blocked)
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        self.waiting.check(self.running)
        assert all(not request.block_ids for request in (*self.waiting, *self.blocked.values()))
        assert self.media_bytes.total == sum(request.media_bytes for request in self.requests.values())
        pending = sum(request.num_pending_tokens for request in self.requests.values())
        assert pending == self._num_pending_tokens
        self.kv.waiting.check([request.request_id for request in (*self.waiting, *self.blocked.values())])
