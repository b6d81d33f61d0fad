"""EngineCore: scheduler, KV cache and executor in one object, driven a step at a time.

The same object serves both ways to run: in the caller's process (`InprocClient`) and in a process of its own
(`core.process`). It raises on its own faults only: nothing a request contains can make `step` raise. A fault in the
bookkeeping (scheduler, KV cache) is logged and healed; one in the executor ends the engine.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.core.kv_cache_manager import KVCacheManager
from argosy_engine.core.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)
from argosy_engine.core.request import Request, RequestStatus
from argosy_engine.core.scheduler import Scheduler
from argosy_engine.core.sleep import SleepState
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.executor.base import Executor
from argosy_engine.structured.manager import StructuredOutputManager
from argosy_engine.worker.step import GrammarBitmask, ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger("argosy.core")

_RATE_SMOOTHING = 0.2
"""Weight of the newest step in the measured rates: a few steps to follow a change, single outliers damped."""


class EngineCore:
    """
    Raises (from the constructor):
        ConfigError: the model or a flag cannot work.
    """

    def __init__(self, args: EngineArgs, executor: Executor) -> None:
        self.executor = executor
        info = executor.start()
        self.config = ResolvedConfig(
            model_path=info.model_path,
            model_name=args.canonical_name,
            model_fingerprint=info.model_fingerprint,
            architecture=info.config.architecture,
            device=info.device,
            dtype=info.dtype,
            max_model_len=info.memory.max_model_len,
            vocab_size=info.config.vocab_size,
            embedding_size=info.config.pooled_size,
            block_size=args.block_size,
            num_gpu_blocks=info.memory.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_queued_reqs=args.max_num_queued_reqs,
            max_num_queued_tokens=args.max_num_queued_tokens,
            scheduling_policy=args.scheduling_policy,
            epoch=secrets.token_hex(8),
            eos_token_ids=info.config.eos_token_ids,
            logits_processors=args.logits_processors,
            max_logprobs=args.max_logprobs,
            logprobs_mode=args.logprobs_mode,
            startup_phases=info.phases,
            memory=info.memory,
        )
        self.kv = KVCacheManager(
            info.memory.num_blocks,
            args.block_size,
            args.enable_prefix_caching,
            args.watermark,
            [group.spec for group in info.kv_cache_groups],
            args.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
            max_model_len=info.memory.max_model_len,
            eos_token_ids=frozenset(info.config.eos_token_ids),
            enable_chunked_prefill=args.enable_chunked_prefill,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            policy=args.scheduling_policy,
        )
        self.structured = StructuredOutputManager.for_model(
            info.model_path,
            info.config.vocab_size,
            info.config.eos_token_ids,
            args.structured_outputs_cache_bytes,
        )
        self.last_step: SchedulerOutput | None = None
        """For the dump of a core that dies."""
        self._prefill_rate = 0.0
        self._decode_step_s = 0.0
        self._is_checked = True
        """Whether the invariants were checked since the last step."""
        self._was_healed = False
        """Whether the last step's bookkeeping failed."""
        self.sleep_state = SleepState(self.scheduler, self.kv, executor)
        self._utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.kv.reset_prefix_cache,
            "check": self._check,
            "stats": self.stats,
            "collective_rpc": self.executor.collective_rpc,
            "sleep": self.sleep_state.sleep,
            "wake_up": self.sleep_state.wake_up,
        }

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.structured.has_compiled

    def add_request(self, message: EngineCoreRequest) -> None:
        self.sleep_state.check_awake()
        request = Request(message, self.kv.block_size, self.kv.enable_prefix_caching)
        if message.grammar is None:
            self.scheduler.add(request)
            return
        # Blocked first: the grammar may be there before the next line.
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.scheduler.add(request)
        # An output that matches its grammar can only end: ignore_eos would leave nothing to say.
        request.stop_ids |= self.scheduler.eos_token_ids
        self.structured.add(request.request_id, message.grammar, message.resume_token_ids)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        try:
            self.scheduler.abort(request_ids)
            self._forget_finished()
        except Exception:
            self._heal("aborting requests")

    def step(self) -> EngineCoreOutputs:
        """Schedules, computes and books one step. One whose bookkeeping fails is empty; the next one starts afresh."""
        self._is_checked = False
        try:
            self._admit_compiled()
            step = self.scheduler.schedule()
            if self.structured:
                step.grammar = self._grammar_bitmask(step)
        except Exception:
            self._heal("scheduling")
            return self.idle_outputs()
        self.last_step = step
        started = time.perf_counter()
        result = self.executor.execute(step)
        self._measure(step, time.perf_counter() - started)
        try:
            for request_id, error in result.errors.items():
                self.scheduler.fail(request_id, error, ErrorKind.INTERNAL)
            if self.structured:
                self._follow_grammars(result)
            outputs = self.scheduler.update(step, result)
            self._forget_finished()
        except Exception:
            self._heal("booking a step")
            return self.idle_outputs()
        self._was_healed = False
        return EngineCoreOutputs(
            outputs=outputs,
            stats=self.stats(step.total_num_scheduled_tokens),
            residency=self.kv.residency.take_delta(),
        )

    def _admit_compiled(self) -> None:
        """Requests whose grammar has become known may run, or end."""
        for compiled in self.structured.take_compiled():
            if compiled.error is None:
                self.scheduler.unblock(compiled.request_id)
            else:
                kind = ErrorKind.BUSY if compiled.is_overload else ErrorKind.INVALID
                self.scheduler.fail(compiled.request_id, compiled.error, kind)

    def _grammar_bitmask(self, step: SchedulerOutput) -> GrammarBitmask | None:
        """What the requests with a grammar that sample in this step may say next."""
        requests = self.scheduler.requests
        request_ids = [
            request_id
            for request_id in self.structured.request_ids
            if request_id in step.num_scheduled_tokens
            and requests[request_id].num_computed_tokens >= requests[request_id].num_tokens
        ]
        return GrammarBitmask(request_ids, self.structured.bitmask(request_ids)) if request_ids else None

    def _follow_grammars(self, result: ModelRunnerOutput) -> None:
        """Tells the grammars what was sampled. A token that does not fit costs its request only."""
        for request_id, token_ids in zip(result.request_ids, result.sampled_token_ids, strict=True):
            error = self.structured.accept(request_id, token_ids)
            if error is not None:
                self.scheduler.fail(request_id, error)

    def _forget_finished(self) -> None:
        requests = self.scheduler.requests
        self.structured.forget([i for i in self.structured.request_ids if i not in requests])

    def stats(self, iteration_tokens: int = 0) -> SchedulerStats:
        """Load now, and the counters since the last call."""
        kv, scheduler = self.kv, self.scheduler
        stats = SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            queued_uncached_tokens=scheduler.queued_uncached_tokens,
            kv_cache_usage=kv.usage,
            prefix_cache_queries=kv.num_queried_tokens,
            prefix_cache_hits=kv.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens_per_s=self._prefill_rate,
            decode_step_s=self._decode_step_s,
            iteration_tokens=iteration_tokens,
        )
        kv.num_queried_tokens = kv.num_hit_tokens = scheduler.num_preemptions = 0
        return stats

    def idle_outputs(self) -> EngineCoreOutputs:
        """Heartbeat of a core with nothing to do; also carries what aborts and resets changed."""
        return EngineCoreOutputs(stats=self.stats(), residency=self.kv.residency.take_delta())

    def check_when_idle(self) -> None:
        """Checks the invariants once after the last step, and heals what it finds."""
        if not self._is_checked and not self.has_work:
            self._is_checked = True
            try:
                self.scheduler.check()
            except AssertionError:
                self._heal("checking the idle engine")

    def _heal(self, activity: str) -> None:
        """Called where an exception was caught: logs it and rebuilds the bookkeeping. Requests are recomputed; if
        that fails in the next step too, they are answered with an error instead."""
        logger.exception("fault while %s: the KV cache is rebuilt, running requests are recomputed", activity)
        error = "the engine could not keep track of this request" if self._was_healed else None
        self._was_healed = True
        self.scheduler.rebuild(error)
        self._forget_finished()
        for request_id in self.structured.request_ids:
            request = self.scheduler.requests[request_id]
            self.structured.replay(request_id, request.all_token_ids[request.num_prompt_tokens :])

    def call_utility(self, call: UtilityCall) -> UtilityOutput:
        """Runs a named utility; failures are answers, not crashes."""
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

    def shutdown(self) -> None:
        self.structured.close()
        self.executor.shutdown()

    def _check(self) -> bool:
        self.scheduler.check()
        return True

    def _measure(self, step: SchedulerOutput, seconds: float) -> None:
        """Rates for the router's cost: steps that mostly prefill give tokens per second, pure decodes give ITL."""
        total, rows = step.total_num_scheduled_tokens, len(step.num_scheduled_tokens)
        if not total:
            return
        if total == rows:
            self._decode_step_s += (seconds - self._decode_step_s) * (
                _RATE_SMOOTHING if self._decode_step_s else 1.0
            )
        elif total >= 4 * rows:
            rate = total / seconds
            self._prefill_rate += (rate - self._prefill_rate) * (
                _RATE_SMOOTHING if self._prefill_rate else 1.0
            )
