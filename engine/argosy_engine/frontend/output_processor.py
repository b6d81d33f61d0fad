"""OutputProcessor: turns the core's outputs into text and finish reasons, for AsyncLLM and LLMEngine.

Like vLLM's (`v1/engine/output_processor.py`), it owns the state of every request in the core, and knows neither the
core's client nor the readers: `process_outputs` returns what the core must be told.

Invariant: observers are told the end of each added request exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from argosy_engine.errors import EngineBusy, EngineError, InvalidRequest, RequestFailed, ResourceBusy
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.observer import Choices, Observer, RequestTimings, TokenWatcher
from argosy_engine.frontend.output_collector import OutputCollector
from argosy_engine.frontend.outputs import RequestOutput
from argosy_engine.frontend.queue_limits import QueueLimits
from argosy_engine.frontend.request_state import RequestState
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.messages.core_messages import EngineCoreOutput, EngineCoreRequest, ErrorKind, FinishReason

logger = logging.getLogger("argosy.frontend")

MAX_DESCRIBED = 64
"""Maximum number of requests listed in a description; the rest is counted."""


@dataclass(slots=True)
class OutputProcessorOutput:
    """Results of processing one message of the core."""

    request_outputs: dict[str, RequestOutput] = field(default_factory=dict)
    """Requests without a queue that got tokens or ended, by id."""
    reqs_to_abort: list[str] = field(default_factory=list)
    """Ids of requests that the core still runs, although they ended at a stop string or their output could not be
    processed."""
    reqs_to_add: list[EngineCoreRequest] = field(default_factory=list)
    """Choices whose prompt is now computed."""
    is_awaited: bool = False
    """Whether a reader has been woken, and has something to take."""


class OutputProcessor:
    """
    Args:
        queue_limits: counts the requests in flight; None: no limit.
    """

    def __init__(self, tokenizer: Tokenizer, queue_limits: QueueLimits | None = None) -> None:
        self.observers: list[Observer] = []
        self.request_states: dict[str, RequestState] = {}
        """States by the core's id of the request."""
        self.requests_drained = asyncio.Event()
        """Set while there is no unfinished request."""
        self.requests_drained.set()
        self._tokenizer = tokenizer
        self._queue_limits = queue_limits

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        index: int,
        *,
        queue: OutputCollector | None = None,
        request_output: RequestOutput | None = None,
        num_queued_tokens: int = 0,
        choices: Choices | None = None,
    ) -> RequestState:
        """Expect outputs of a request that is about to be sent to the core.

        Args:
            num_queued_tokens: prompt tokens that count against the queue limits until the first token.
            choices: the choices of its prompt, this one among them; None: it is the only one.
        """
        if self._queue_limits is not None:
            self._queue_limits.enter(request.request_id, num_queued_tokens, request.data_parallel_rank)
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, request.sampling_params, request.prompt_token_ids
        )
        params = request.sampling_params
        num_prompt = len(request.prompt_token_ids)
        if request.pooling_params is not None:
            timings = RequestTimings(choices, num_prompt=num_prompt)
        else:
            timings = RequestTimings(choices, params.max_tokens, num_prompt=num_prompt, params=params)
        state = RequestState(
            index,
            detokenizer,
            num_prompt,
            queue,
            request_output,
            timings,
            final_only=request.final_only and not params.stop,
        )
        state.stream_interval = params.stream_interval
        self.request_states[request.request_id] = state
        self.requests_drained.clear()
        return state

    def process_outputs(
        self, outputs: Sequence[EngineCoreOutput], timestamp: float = 0.0
    ) -> OutputProcessorOutput:
        """Deliver outputs to their queues and results. An output that cannot be processed fails its request only.

        Args:
            timestamp: when they would have arrived, in monotonic seconds, if the core has held the message; 0: now.
        """
        processed, now = OutputProcessorOutput(), timestamp or time.monotonic()
        watchers = [observer.on_tokens for observer in self.observers if observer.watches_tokens]
        for output in outputs:
            try:
                self._process(output, now, processed, watchers)
            except Exception:
                logger.exception("processing the output of request %s failed", output.request_id)
                error = RequestFailed("the engine could not process its own output")
                self._fail_and_report(output.request_id, error, processed)
                processed.reqs_to_abort.append(output.request_id)
        return processed

    def _process(
        self,
        output: EngineCoreOutput,
        now: float,
        processed: OutputProcessorOutput,
        watchers: Sequence[TokenWatcher],
    ) -> None:
        state = self.request_states.get(output.request_id)
        if state is None:
            return  # it was aborted, or has just ended at a stop string
        if output.finish_reason is FinishReason.ERROR:
            self._fail_and_report(output.request_id, request_error(output), processed)
            return
        timings, num_tokens = state.timings, len(output.new_token_ids)
        timings.num_preemptions = output.num_preemptions
        if output.prefill_stats is not None:
            # A resumed request's output may have been cached, too.
            timings.num_cached = min(output.prefill_stats.num_cached_tokens, state.num_prompt)
            timings.queued_s = output.prefill_stats.queued_s
            timings.prefill_s = output.prefill_stats.prefill_s
        is_first, state.has_output = not state.has_output, True
        if state.siblings:
            processed.reqs_to_add += state.siblings
            state.siblings = ()
        state.num_output += num_tokens
        for step in output.held_steps:
            num_tokens -= step.num_tokens
            _count_tokens(timings, step.num_tokens, step.timestamp, False, watchers)
        if num_tokens or output.finish_reason is not None or not output.held_steps:
            _count_tokens(timings, num_tokens, now, is_first, watchers)
        if is_first:
            timings.first_token = timings.last_token
            if self._queue_limits is not None:
                self._queue_limits.start(output.request_id)
        if state.withhold(output):
            return
        output = state.release(output)
        detokenizer = state.detokenizer
        text = detokenizer.update(
            output.new_token_ids,
            output.finish_reason is not None,
            ends_at_stop_token=output.finish_reason is FinishReason.STOP,
        )
        finish_reason = None if output.finish_reason is None else str(output.finish_reason)
        stop_reason: int | str | None = output.stop_reason
        if detokenizer.stop_reason is not None:
            if finish_reason is None:
                processed.reqs_to_abort.append(output.request_id)
            finish_reason, stop_reason = str(FinishReason.STOP), detokenizer.stop_reason
            output = state.without_tokens_past_stop(output)
        if finish_reason is not None:
            self.finish(output.request_id, finish_reason)
        if state.queue is not None:
            delta = state.hold(state.delta(output, text, finish_reason, stop_reason, is_first), is_first)
            if delta is not None and state.queue.put(delta):
                processed.is_awaited = True
        elif (result := state.request_output) is not None:
            state.accumulate(result, output, text, finish_reason, stop_reason)
            processed.request_outputs[result.request_id] = result

    def finish(self, request_id: str, reason: str) -> RequestState | None:
        """Remove a request and tell the observers why it ended; returns None if it had ended before."""
        state = self.request_states.pop(request_id, None)
        if not self.request_states:
            self.requests_drained.set()
        if state is not None:
            if self._queue_limits is not None:
                self._queue_limits.leave(request_id)
            for observer in self.observers:
                observer.on_finished(state.timings, state.num_prompt, state.num_output, reason)
        return state

    def fail(self, request_id: str, error: EngineError, reason: str = "error") -> RequestState | None:
        """End a request with an error for its reader; returns None if it had ended before.

        Without a queue, the choices that wait for this one fail, too; with a queue, the reader ends them.
        """
        state = self.finish(request_id, reason)
        if state is None:
            return None
        if state.queue is not None:
            if state.held is not None:
                state.queue.put(state.held)
            state.queue.fail(error)
        elif (result := state.request_output) is not None:
            result.error = str(error)
            result.outputs[state.index].finish_reason = reason
            for sibling in state.siblings:
                self.fail(sibling.request_id, error, reason)
        return state

    def fail_all(self, error: EngineError, reason: str = "error") -> list[str]:
        """End all requests with an error, and return their ids."""
        request_ids = list(self.request_states)
        for request_id in request_ids:
            self.fail(request_id, error, reason)
        return request_ids

    def _fail_and_report(self, request_id: str, error: EngineError, processed: OutputProcessorOutput) -> None:
        state = self.fail(request_id, error)
        processed.is_awaited = True
        if state is not None and (result := state.request_output) is not None:
            processed.request_outputs[result.request_id] = result

    def silent_requests(self, silent_s: float) -> list[str]:
        """Return the ids of the requests in the core without output for a number of seconds."""
        now = time.monotonic()
        return [
            request_id
            for request_id, state in self.request_states.items()
            if state.is_submitted and now - max(state.timings.arrived, state.timings.last_token) >= silent_s
        ]

    def describe(self) -> list[str]:
        """Describe the ages of requests and their readers for the log, one line each, without any text."""
        now = time.monotonic()
        lines = []
        for request_id, state in list(self.request_states.items())[:MAX_DESCRIBED]:
            timings, queue = state.timings, state.queue
            silent_s = now - max(timings.arrived, timings.last_token)
            line = (
                f"    {request_id}: age={now - timings.arrived:.1f}s silent={silent_s:.1f}s "
                f"submitted={state.is_submitted} siblings={len(state.siblings)} output={state.num_output}"
            )
            if queue is not None:
                line += f" reader: pending={queue.num_pending} last took {now - queue.taken_at:.1f} s ago"
            lines.append(line)
        if len(self.request_states) > MAX_DESCRIBED:
            lines.append(f"    and {len(self.request_states) - MAX_DESCRIBED} more")
        return lines


def _count_tokens(
    timings: RequestTimings, count: int, now: float, is_first: bool, watchers: Sequence[TokenWatcher]
) -> None:
    now = max(now, timings.last_token)  # an output that was not held back may have arrived late
    for watcher in watchers:
        watcher(timings, count, now, is_first)
    timings.last_token = now


def request_error(output: EngineCoreOutput) -> EngineError:
    """Make the exception for a request that the core could not run."""
    message = output.error or "the engine could not run this request"
    match output.error_kind:
        case ErrorKind.INVALID:
            return InvalidRequest(message, param="prompt")
        case ErrorKind.INVALID_GRAMMAR:
            return InvalidRequest(message, param="grammar")
        case ErrorKind.BUSY:
            return ResourceBusy(message)
        case ErrorKind.ASLEEP:
            return EngineBusy(message)
        case ErrorKind.INTERNAL:
            return RequestFailed(message)
