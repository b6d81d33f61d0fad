"""EngineCore: runs scheduler, KV cache, grammars and executor, one step per call.

The same class serves both ways to run: in the caller's process (`InprocClient`) and in a process of its own
(`core_process`). `step` raises only if the executor fails, which ends the engine; no content of a request can make it
raise. A fault in the bookkeeping (scheduler, KV cache) is logged, and the state is rebuilt.

With async scheduling two steps are in flight: while the device computes one, the core schedules and launches the next
and processes the output of the one before. With pipeline parallelism there is one in flight per stage, each of other
requests. The tokens are the same in all cases; the output of a step for a request that has ended meanwhile is dropped.

Cores that share experts (`--enable-expert-parallel` with several of them) agree on every step before they launch it: a
core without tokens lends its experts to the others' step, even while no request is in it (`distributed.lockstep`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from argosy_engine.config import EngineArgs, max_num_mixed_prefill_tokens
from argosy_engine.core.encoder_cache import check_features
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.request import BLOCKED, Request, RequestStatus
from argosy_engine.core.resolve_config import resolve_config
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.core.steps import StepTiming
from argosy_engine.distributed.lockstep import Lockstep
from argosy_engine.errors import EngineAsleep, EngineDead, ResourceBusy, UtilityFailed
from argosy_engine.executor.abstract import Executor, PendingOutput
from argosy_engine.messages import (
    CollectiveRpc,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
    check_sleep_level,
)
from argosy_engine.structured.manager import (
    CopiedGrammars,
    GrammarFailure,
    StructuredOutputManager,
    create_structured_output_manager,
)

logger = logging.getLogger("argosy.core")

CHECK_INTERVAL_S = 5.0
"""Seconds between two checks of all requests; a check costs about a microsecond per request."""


class Progress:
    """Progress of a request at the last check, and for how many seconds it has not changed."""

    __slots__ = ("position", "still_s")

    def __init__(self, position: tuple[int, ...]) -> None:
        self.position = position
        self.still_s = 0.0


class Watchdog:
    """Measures for how long each request has made no progress.

    It finds requests that make no progress, so that the core can fail them instead of keeping them for ever. A request
    makes progress when its tokens, its computed tokens or its status change. Time without progress does not count if
    there is a good reason: the core's loop may be busy elsewhere (loading weights, for example), and a request that
    waits or is in prefill may have to wait as long as tokens of other requests are computed. Requests that merely
    arrive or leave are not progress. What remains is a fault of the engine, which fails this one request and is
    counted.

    The watchdog does not detect a core whose loop hangs: its heartbeats end, and `/health` fails.

    Args:
        timeout_s: how long a request may make no progress; 0 means no limit.
        clock: returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._checked_at = clock()
        self._marks: dict[str, Progress] = {}
        self._num_computed = 0

    @property
    def is_due(self) -> bool:
        return self._clock() - self._checked_at >= CHECK_INTERVAL_S

    def check(self, requests: Iterable[Request], num_computed: int = 0) -> list[str]:
        """Return the ids of the requests that have stalled for too long. Call it when it `is_due`.

        Args:
            requests: all unfinished requests.
            num_computed: tokens computed so far for all requests, including those that came and went between checks.
        """
        now = self._clock()
        # In a longer gap the loop was busy with something else.
        elapsed = min(now - self._checked_at, 2 * CHECK_INTERVAL_S)
        self._checked_at = now
        marks, before = dict[str, Progress](), self._marks
        has_moved, self._num_computed = num_computed > self._num_computed, num_computed
        standing: list[tuple[Request, Progress]] = []
        for request in requests:
            position = _position(request)
            mark = before.get(request.request_id)
            if mark is None:
                mark = Progress(position)
            elif mark.position != position:
                has_moved = has_moved or _has_grown(mark.position, position)
                mark = Progress(position)
            else:
                standing.append((request, mark))
            marks[request.request_id] = mark
        self._marks = marks
        for request, mark in standing:
            is_decoding = request.status is RequestStatus.RUNNING and request.has_first_token
            if not has_moved or is_decoding or request.status in BLOCKED:
                mark.still_s += elapsed
        if not self.timeout_s:
            return []
        return [request.request_id for request, mark in standing if mark.still_s >= self.timeout_s]

    def excuse(self, request_id: str) -> None:
        """Begin to count anew for a request that waits for others."""
        mark = self._marks.get(request_id)
        if mark is not None:
            mark.still_s = 0.0

    def forget(self) -> None:
        """Drop the marks: no request is left. Otherwise those of the last check would stay until the next one."""
        self._marks = {}

    def still_s(self, request_id: str) -> float:
        """Return the seconds without progress that count for this request."""
        mark = self._marks.get(request_id)
        return mark.still_s if mark is not None else 0.0


def _position(request: Request) -> tuple[int, ...]:
    return request.num_tokens, request.num_computed_tokens, request.status, request.num_preemptions


def _has_grown(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether a request has more tokens, or more computed tokens, than before."""
    return now[0] > before[0] or now[1] > before[1]


class SleepState:
    """Whether the workers hold weights and KV cache, and the transitions between the levels.

    Sleeping needs an idle scheduler. The prefix cache is reset first, which announces to every router that nothing is
    resident. Block ids stay valid, so the scheduler continues with the same pool after wake-up.
    """

    def __init__(self, scheduler: Scheduler, kv: KVCacheManager, executor: Executor) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._executor = executor
        self.level = 0
        """Sleep level; 0 is awake."""

    def check_awake(self) -> None:
        """Raise EngineAsleep if the engine is asleep."""
        if self.level:
            raise EngineAsleep(
                "the engine is asleep; wake it up first, with wake_up() of an LLM or POST /wake_up of a server"
            )

    def sleep(self, level: int) -> None:
        """Free weights and KV cache. A sleeping engine may be put to sleep at another level.

        Raises:
            UtilityFailed: the level does not exist, or there are unfinished requests.
        """
        check_sleep_level(level)
        if self._scheduler.has_unfinished_requests or not self._kv.reset_prefix_cache():
            raise UtilityFailed("requests are running")
        self._executor.collective_rpc(CollectiveRpc("sleep", args=[level]))
        self._scheduler.forget_released()
        self._scheduler.encoder_cache.reset()
        self.level = level

    def wake_up(self) -> None:
        """Load the weights and allocate the KV cache. No effect on an engine that is awake.

        Raises:
            UtilityFailed: memory no longer suffices, or the checkpoint is gone; the engine stays asleep.
        """
        self._executor.collective_rpc(CollectiveRpc("wake_up"))
        self.level = 0


MAX_MEDIA_BYTES = 2 << 30
"""Of the tensors of unfinished requests' images."""
_NO_STEP = SchedulerOutput(
    new_requests=[],
    new_block_ids={},
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    finished_request_ids=[],
    scheduled_spec_token_ids={},
)


class _LaunchedStep(NamedTuple):
    """Step that the workers compute, whose output is not processed yet."""

    step: SchedulerOutput
    pending: PendingOutput
    at: float
    """When it was launched, by `time.perf_counter()`."""


class EngineCore:
    """The engine core, ready to run once constructed.

    Args:
        lockstep: of a core that shares experts with others.

    Raises (from the constructor):
        ConfigError: the model cannot be served, or not with these flags. The executor is shut down then.
    """

    def __init__(self, args: EngineArgs, executor: Executor, lockstep: Lockstep | None = None) -> None:
        self.executor = executor
        self.lockstep = lockstep
        try:
            self._start(args, executor)
        except BaseException:
            executor.shutdown()
            raise

    def _start(self, args: EngineArgs, executor: Executor) -> None:
        info = executor.start()
        if info.config.computes_whole_prompts:
            args = args.with_whole_prompts(info.memory.max_model_len)
        self.config = resolve_config(args, info)
        self.kv = KVCacheManager(
            info.memory.num_blocks,
            args.block_size,
            args.enable_prefix_caching,
            args.watermark,
            [group.spec for group in info.kv_cache_groups],
            args.max_num_batched_tokens,
            args.kv_cache_metrics_sample if args.kv_cache_metrics else 0.0,
            info.memory.num_states,
            args.mamba_block_size,
        )
        self._vision = info.config.vision
        self.scheduler = Scheduler(
            self.kv,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=min(args.max_num_seqs, info.memory.most_running),
            max_model_len=info.memory.max_model_len,
            eos_token_ids=frozenset(info.config.eos_token_ids),
            enable_chunked_prefill=args.enable_chunked_prefill,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            max_num_mixed_prefill_tokens=max_num_mixed_prefill_tokens(args, info.device),
            policy=args.scheduling_policy,
            pipeline_parallel_size=args.pipeline_parallel_size,
        )
        self.structured: StructuredOutputManager | CopiedGrammars = create_structured_output_manager(
            self.config.tokenizer_folder,
            info.config.vocab_size,
            info.config.eos_token_ids,
            args.structured_outputs_cache_bytes,
        )
        self._max_in_flight = 2 if self.config.async_scheduling else args.pipeline_parallel_size
        self._launched: deque[_LaunchedStep] = deque()
        """Steps whose output is not processed yet, oldest first."""
        self._last_step: SchedulerOutput | None = None
        self._timing = StepTiming()
        self._is_checked = True
        """Whether the invariants have been checked since the last step."""
        self._was_rebuilt = False
        """Whether the state was rebuilt and no step has been processed since."""
        self.watchdog = Watchdog(args.request_stall_timeout)
        self._num_stalled = 0
        self._num_computed = 0
        """Number of tokens computed by all processed steps, for the watchdog."""
        self.step_began_at = self.step_ended_at = time.monotonic()
        self.sleep_state = SleepState(self.scheduler, self.kv, executor)
        self._utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.kv.reset_prefix_cache,
            "check": self._check,
            "unknown_requests": self._unknown_requests,
            "collective_rpc": self._collective_rpc,
            "sleep": self._sleep,
            "wake_up": self.sleep_state.wake_up,
        }

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_work or self.structured.has_compiled or self._launched)

    @property
    def last_steps(self) -> list[SchedulerOutput]:
        """Steps for the dump of a dying core: those in flight, oldest first, and the last one given to the executor."""
        steps = [launched.step for launched in self._launched]
        if self._last_step is not None and all(step is not self._last_step for step in steps):
            steps.append(self._last_step)
        return steps

    def preprocess_request(self, message: EngineCoreRequest) -> Request:
        """Build the core's request from a message and hash its prompt. Thread-safe: it reads no mutable state.

        Raises:
            ValueError: its multimodal items do not fit its prompt, or the model.
        """
        spans: list[tuple[int, int]] = []
        if message.mm_features:
            spans = check_features(message, self._vision, self.scheduler.max_num_batched_tokens)
        request = Request(message, self.kv.block_size, self.kv.enable_prefix_caching)
        request.whole_spans = spans
        return request

    def add_request(self, message: EngineCoreRequest, request: Request | None = None) -> None:
        """Queue a request, and start to compile its grammar if it has one.

        Args:
            request: result of `preprocess_request` for this message, if that was called already.

        Raises:
            EngineAsleep: the engine is asleep.
            ResourceBusy: its images have no room beside those of others.
        """
        self.sleep_state.check_awake()
        request = request or self.preprocess_request(message)
        held, size = self.scheduler.media_bytes, request.media_bytes
        held.limit = MAX_MEDIA_BYTES
        own = held.held_by(request.tenant)
        if size and not held.takes(request.tenant, size):
            raise ResourceBusy(
                f"the images of unfinished requests take {held.total >> 20} MiB, {own >> 20} of them of the same key, "
                f"and those of this one {size >> 20} more, of {MAX_MEDIA_BYTES >> 20}; try again later"
            )
        if message.grammar is None:
            self.scheduler.add(request)
            return
        # Block the request before asking for the grammar: it may be compiled at once.
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.scheduler.add(request)
        # Once the output is complete, the grammar allows only EOS, so `ignore_eos` cannot be honoured.
        request.stop_ids |= self.scheduler.eos_token_ids
        try:
            urgency = request.queue_key[0]
            self.structured.add(
                request.request_id, message.grammar, message.resume_token_ids, message.tenant, urgency
            )
        except Exception:
            self.scheduler.abort([request.request_id])  # the caller reports the error to the client
            raise

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        try:
            self.scheduler.abort(request_ids)
            self._forget_finished()
        except Exception:
            self._recover("aborting requests")

    def step(self) -> EngineCoreOutputs:
        """Launch the next step, then wait for the oldest step in flight and process its output.

        Returns empty outputs (without stats) if another step may be launched first, and idle outputs if the bookkeeping
        failed and was rebuilt.
        """
        self._is_checked = False
        self.step_began_at = time.monotonic()
        try:
            return self._step()
        finally:
            self.step_ended_at = time.monotonic()

    @property
    def is_stepping(self) -> bool:
        return self.step_ended_at < self.step_began_at

    def _step(self) -> EngineCoreOutputs:
        step = self._schedule()
        if step is None or not self._agree(step):
            return self.idle_outputs()
        if step.num_scheduled_tokens or step.finished_request_ids:
            self._last_step = step
            at = (
                time.perf_counter()
            )  # before `execute`, because an executor may compute the step before it returns
            self._launched.append(_LaunchedStep(step, self.executor.execute(step), at))
            if step.num_scheduled_tokens and len(self._launched) < self._max_in_flight:
                return EngineCoreOutputs()
        elif not self._launched:
            return self._process_output(step, ModelRunnerOutput([], []))
        launched = self._launched[0]
        result = launched.pending.get()
        self._launched.popleft()
        self._timing.ended(launched.step, launched.at, time.perf_counter())
        outputs = self._process_output(launched.step, result)
        self._mask_next()
        return outputs

    def _agree(self, step: SchedulerOutput) -> bool:
        """Agree on a step with the cores that share experts, or join theirs if it has no tokens. Returns False if the
        step must not be launched, because another core is asleep; then its requests have ended."""
        if self.lockstep is None:
            return True
        num_tokens = step.total_num_scheduled_tokens
        if not num_tokens:
            self.lend_experts()
            return True
        is_decode = num_tokens == len(step.num_scheduled_tokens)
        step.round = self.lockstep.join(num_tokens, is_decode=is_decode)
        if step.round is None:
            logger.error("another engine core is asleep: the requests of this one end")
            self._rebuild("the engine is asleep in part; wake it up first, with wake_up() or POST /wake_up")
        return step.round is not None

    def lend_experts(self) -> None:
        """Compute this core's experts for the step that other cores have begun, if they have."""
        if self.lockstep is not None and self.lockstep.is_called:
            agreed = self.lockstep.join(0, is_awake=not self.sleep_state.level)
            if agreed is not None:
                self.executor.lend_experts(agreed)

    def _schedule(self) -> SchedulerOutput | None:
        """Schedule the next step; None if the bookkeeping failed and was rebuilt."""
        try:
            self._admit_compiled()
            step = self.scheduler.schedule()
            if self.structured:
                self.structured.start(request.request_id for request in step.new_requests)
                # What a grammar allows depends on tokens that are still in flight; `_mask_next` sends the mask then.
                is_async = self.config.async_scheduling
                step.awaits_grammar = bool(is_async and self._launched and self._with_grammar(step))
                step.grammar = None if step.awaits_grammar else self._grammar_bitmask(step)
            return step
        except Exception:
            self._recover("scheduling")
            return None

    def _process_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        """Process the output of a step: update grammars and scheduler."""
        try:
            if result.lost:
                self._lose(step, result.lost)
                step, result = _NO_STEP, ModelRunnerOutput([], [])
            elif result.failed_encodings:
                self._lose_images(result.failed_encodings)
                step, result = _NO_STEP, ModelRunnerOutput([], [])
            stale = self.scheduler.in_flight.stale(step) if step.num_scheduled_tokens else ()
            for request_id, error in result.errors.items():
                if request_id not in stale:
                    self.scheduler.fail(request_id, error, ErrorKind.INTERNAL)
            if self.structured:
                self._follow_grammars(result, stale)
            outputs = self.scheduler.update_from_output(step, result)
            self._forget_finished()
        except Exception:
            self._recover("processing the output of a step")
            return self.idle_outputs()
        self._was_rebuilt = False
        self._num_computed += step.total_num_scheduled_tokens
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.stats(step.total_num_scheduled_tokens),
            residency=self.kv.announcer.take_delta(),
        )

    def _mask_next(self) -> None:
        """Send the grammar bitmask to the launched step that waits for it, now that the previous tokens are known."""
        if not self._launched or not self._launched[-1].step.awaits_grammar:
            return
        launched = self._launched[-1]
        mask = None
        try:
            mask = self._grammar_bitmask(launched.step)
        except Exception:
            self._recover("masking a step")
        launched.pending.sample(mask)

    def _admit_compiled(self) -> None:
        """Unblock requests whose grammar has been compiled, fail those whose compilation failed, and block those that
        have to wait for it again."""
        for compiled in self.structured.take_compiled():
            if compiled.is_deferred:
                self.scheduler.block(compiled.request_id)
            elif compiled.failure is None:
                self.scheduler.unblock(compiled.request_id)
            else:
                self._fail({compiled.request_id: compiled.failure})

    def _fail(self, failures: Mapping[str, GrammarFailure]) -> None:
        """Fail requests whose grammar cannot be compiled or followed."""
        for request_id, failure in failures.items():
            kind = ErrorKind.INVALID_GRAMMAR
            if failure.is_overload or failure.is_fault:
                kind = ErrorKind.BUSY if failure.is_overload else ErrorKind.INTERNAL
            self.scheduler.fail(request_id, failure.reason, kind)

    def _with_grammar(self, step: SchedulerOutput) -> list[str]:
        """Return the ids of the requests with a grammar that sample a token in this step, the newest one."""
        requests = self.scheduler.requests
        return [
            request_id
            for request_id in self.structured.request_ids
            if request_id in step.num_scheduled_tokens
            and requests[request_id].num_computed_tokens >= requests[request_id].num_tokens
        ]

    def _grammar_bitmask(self, step: SchedulerOutput) -> GrammarBitmask | None:
        """Compute which tokens the grammars allow in this step; None if no request in it has a grammar."""
        request_ids = self._with_grammar(step)
        if not request_ids:
            return None
        bitmask, failures = self.structured.bitmask(request_ids, step.scheduled_spec_token_ids)
        self._fail(failures)
        return GrammarBitmask(request_ids, bitmask)

    def _follow_grammars(self, result: ModelRunnerOutput, stale: Collection[str]) -> None:
        """Advance the grammars by the sampled tokens. A token that a grammar rejects fails only its own request."""
        sampled = zip(result.request_ids, result.sampled_token_ids, strict=True)
        self._fail(
            self.structured.accept(
                {request_id: token_ids for request_id, token_ids in sampled if request_id not in stale}
            )
        )

    def _forget_finished(self) -> None:
        requests = self.scheduler.requests
        self.structured.forget([i for i in self.structured.request_ids if i not in requests])
        if not requests:
            self.watchdog.forget()

    def stats(self, iteration_tokens: int = 0) -> SchedulerStats:
        """Return the current load, and the counters since the last call."""
        kv, scheduler = self.kv, self.scheduler
        stats = SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            queued_uncached_tokens=scheduler.queued_uncached_tokens,
            kv_cache_usage=kv.usage,
            prefix_cache_queries=kv.num_queried_tokens,
            prefix_cache_hits=kv.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens_per_s=self._timing.prefill_tokens_per_s,
            decode_step_s=self._timing.decode_step_s,
            iteration_tokens=iteration_tokens,
            longest_step_s=self._timing.longest_step_s,
            num_stalled=self._num_stalled,
            num_yielding=scheduler.waiting.num_yielding,
            num_deferred=len(scheduler.blocked),
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            evicted_blocks=kv.lives.take() if kv.lives else [],
            encoder_cache_queries=scheduler.encoder_cache.num_queries,
            encoder_cache_hits=scheduler.encoder_cache.num_hits,
        )
        self._num_stalled = scheduler.encoder_cache.num_queries = scheduler.encoder_cache.num_hits = 0
        kv.num_queried_tokens = kv.num_hit_tokens = 0
        scheduler.num_preemptions = scheduler.num_recomputed_tokens = 0
        return stats

    def tick(self) -> None:
        """Check deadlines of grammars and requests that make no progress; cheap enough for each turn of the loop."""
        try:
            self.structured.tick()
        except Exception:
            logger.exception("fault while checking the deadlines of grammars")
        try:
            if self.watchdog.is_due:
                self._release_blocked()
                self._fail_stalled()
        except Exception:
            self._recover("checking the progress of requests")

    def _fail_stalled(self) -> None:
        """Fail the requests that the watchdog reports as stalled."""
        checked = self.watchdog.check(self.scheduler.requests.values(), self._num_computed)
        blocked = self.scheduler.blocked
        deferred = {request_id for request_id in blocked if self.structured.is_deferred(request_id)}
        for request_id in deferred:  # it needs time to be compiled once it has room
            self.watchdog.excuse(request_id)
        stalled = [request_id for request_id in checked if request_id not in deferred]
        if not stalled:
            return
        self._num_stalled += len(stalled)
        logger.error(
            "%d requests made no progress for %g s and are failed", len(stalled), self.watchdog.timeout_s
        )
        reason = f"the engine made no progress with this request for {self.watchdog.timeout_s:g} s"
        for request_id in stalled:
            self.scheduler.fail(request_id, reason, ErrorKind.INTERNAL)
        self._forget_finished()

    def _unknown_requests(self, request_ids: list[str]) -> list[str]:
        """Return those of the ids that the core does not know (any more)."""
        return [request_id for request_id in request_ids if request_id not in self.scheduler.requests]

    def idle_outputs(self) -> EngineCoreOutputs:
        """Build the heartbeat of an idle core, with the residency changes of aborts and resets."""
        return EngineCoreOutputs(stats=self.stats(), residency=self.kv.announcer.take_delta())

    def check_when_idle(self) -> None:
        """Check the invariants once after the last step, and rebuild the state if one is violated."""
        if not self._is_checked and not self.has_work:
            self._is_checked = True
            try:
                self.scheduler.check()
            except AssertionError:
                self._recover("checking the idle engine")

    def _recover(self, activity: str) -> None:
        """Log the exception being handled and rebuild the bookkeeping.

        Unfinished requests are recomputed. If no step has succeeded since the last rebuild, they end with an error
        instead.

        Raises:
            EngineDead: the exception, if it is one.
        """
        if isinstance(sys.exception(), EngineDead):
            raise
        logger.exception("fault while %s: the KV cache is rebuilt, running requests are recomputed", activity)
        error = "the engine could not keep track of this request" if self._was_rebuilt else None
        self._was_rebuilt = True
        self._rebuild(error)

    def _lose(self, step: SchedulerOutput, reason: str) -> None:
        """End the request that computed the most tokens in a lost step, and recompute the others.

        They are recomputed because the keys and values that the step should have written may be shared already.
        """
        counts, stale = step.num_scheduled_tokens, self.scheduler.in_flight.stale(step)
        logger.error(
            "a step of %d tokens for %d requests did not fit into memory: the largest ends, the others are recomputed; "
            "lower --max-num-batched-tokens or --gpu-memory-utilization (%s)",
            step.total_num_scheduled_tokens,
            len(counts),
            reason,
        )
        # The last one, if several are equal: it waited least.
        ended = max(
            reversed([each for each in counts if each not in stale]), key=counts.__getitem__, default=None
        )
        if ended is not None:
            error = (
                "there was not enough memory on the device to compute this request; try again, or send less"
            )
            self.scheduler.fail(ended, error, ErrorKind.INTERNAL)
        self._rebuild()

    def _lose_images(self, reasons: Mapping[str, str]) -> None:
        """End the requests with images that could not be encoded, and recompute the others: what these requests have
        written may be shared already."""
        for request_id, request in list(self.scheduler.requests.items()):
            found = next((each for each in request.mm_features if each.identifier in reasons), None)
            if found is not None:
                reason = (
                    f"an {found.modality} of this request could not be encoded: {reasons[found.identifier]}"
                )
                self.scheduler.fail(request_id, reason, ErrorKind.INTERNAL)
        self._rebuild()

    def _rebuild(self, error: str | None = None) -> None:
        """Rebuild the bookkeeping: recompute unfinished requests, or end them with an error."""
        self.scheduler.rebuild(error)
        self._forget_finished()
        for request_id in self.structured.request_ids:
            request = self.scheduler.requests[request_id]
            failure = self.structured.replay(request_id, request.all_token_ids[request.num_prompt_tokens :])
            if failure is not None:
                self._fail({request_id: failure})
        self._release_blocked()

    def _release_blocked(self) -> None:
        """Unblock or fail requests that a fault left blocked although no compilation is pending for them."""
        for request_id in list(self.scheduler.blocked):
            if self.structured.is_waiting_for(request_id):
                continue
            if self.structured.is_following(request_id):
                self.scheduler.unblock(request_id)
            else:
                logger.error("request %s was blocked and waited for nothing", request_id)
                self._fail(
                    {request_id: GrammarFailure("the engine lost this request's grammar", is_fault=True)}
                )

    def call_utility(self, call: UtilityCall) -> UtilityOutput:
        """Run a utility by name. A failure is returned in the output; only `EngineDead` is raised."""
        method = self._utilities.get(call.method)
        if method is None:
            return UtilityOutput(call.call_id, f"unknown utility {call.method!r}")
        try:
            return UtilityOutput(call.call_id, None, method(*call.args))
        except UtilityFailed as error:
            return UtilityOutput(call.call_id, str(error))
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("utility %s failed", call.method)
            return UtilityOutput(call.call_id, f"{type(error).__name__}: {error}")

    def _sleep(self, level: int) -> None:
        """Put the engine to sleep (`SleepState.sleep`), after the steps in flight if no request needs their output."""
        while self._launched and not self.scheduler.has_unfinished_requests:
            launched = self._launched.popleft()
            self.scheduler.update_from_output(launched.step, launched.pending.get())
        self.sleep_state.sleep(level)

    def _collective_rpc(self, call: Any) -> list[Any]:
        """Call a method of every worker.

        Args:
            call: a `CollectiveRpc`, or its msgpack values if it came from another process.
        """
        return self.executor.collective_rpc(msgspec.convert(call, CollectiveRpc))

    def shutdown(self) -> None:
        self.structured.close()
        self.executor.shutdown()

    def _check(self) -> bool:
        self.scheduler.check()
        return True
