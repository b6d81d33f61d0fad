"""OutputProcessor: turns the core's outputs into text and finish reasons, for AsyncLLM and LLMEngine.

Like vLLM's (`v1/engine/output_processor.py`), it owns the state of every request in the core, and knows neither the
core's client nor the readers: `process_outputs` returns what the core must be told. What becomes of an output here:

    EngineCoreOutput -> RequestState (counts, detokenizer, what is held back)
        -> GenerationOutput, a delta of one choice -> OutputCollector -> the reader of one call of AsyncLLM
        -> RequestOutput, all that a prompt has so far, for LLMEngine

Invariant: observers are told the end of each added request exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from argosy_engine.errors import EngineBusy, EngineError, InvalidRequest, RequestFailed, ResourceBusy
from argosy_engine.frontend.admission import QueueLimits
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.observer import Choices, Observer, RequestTimings, TokenWatcher
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, ErrorKind, FinishReason
from argosy_engine.sample.token_logprobs import TokenLogprobs

logger = logging.getLogger("argosy.frontend")


MAX_DESCRIBED = 64
"""Maximum number of requests listed in a description; the rest is counted."""


MAX_MERGED_VALUES = 4096
"""Outputs of a choice are merged until they have so many tokens and log probabilities, which makes an event of some
150 KB. Routers and proxies refuse events that are much larger."""


MAX_WITHHELD = 256
"""Tokens of a choice from which on no more are withheld. Decoding them takes the event loop about a millisecond."""


class GenerationOutput(msgspec.Struct):
    """New text and tokens of one choice since the last output; the counts are totals."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    logprobs: list[TokenLogprobs] = []
    """One per token of `token_ids`, if the request asked for them."""
    num_unshown: int = 0
    """Number of tokens, the last ones so far, of whose text nothing has come: it is held back, or ended the output."""
    resumed_text: str = ""
    """Text of the run that this one continues, with a choice's first output. The reader has it already."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities of all prompt tokens but the first, with a choice's first output, if requested."""
    embedding: list[float] | None = None
    """The prompt's vector, if requested. There are no tokens then, and this is the only output."""

    @property
    def num_values(self) -> int:
        """Tokens and log probabilities, which an event that shows this output names."""
        width = len(self.logprobs[0].token_ids) if self.logprobs else 0
        return len(self.token_ids) + width * len(self.logprobs)

    def merge(self, later: GenerationOutput) -> None:
        """Append a later output of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_prompt_tokens = later.num_prompt_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.num_output_tokens = later.num_output_tokens
        self.num_unshown = later.num_unshown
        self.resumed_text += later.resumed_text
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a `RequestOutput`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """Empty while the choice runs; `error` if the engine could not continue it."""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if requested."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the whole output; None without `logprobs`."""
        return sum(entry.logprobs[0] for entry in self.logprobs) if self.logprobs else None


@dataclass(slots=True)
class RequestOutput:
    """The choices of one prompt, with everything generated so far."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first, if requested."""
    num_cached_tokens: int = 0
    error: str | None = None
    """Why a choice ended with `error`."""
    prompt: str | None = None
    """Text of the prompt, of a chat as the template made it; None if it was given as token ids."""

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)

    @property
    def text(self) -> str:
        """Text of the first choice. The properties below describe the first choice, too."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason


def log_failures(errors: Sequence[str | None]) -> None:
    """Log how many results of a batch have an error, for users who look only at the texts."""
    failed = [error for error in errors if error is not None]
    if failed:
        logger.error("%d of %d requests failed, the first with: %s", len(failed), len(errors), failed[0])


class OutputCollector:
    """Buffer of a call's outputs. While the reader lags behind, outputs of a choice are merged, so a choice never holds
    more than its complete output, however slow the reader is, and few outputs.

    Args:
        on_delta: takes an output at once in the reader's place, and returns whether it did; else the reader gets it. It
            is called while the reader waits and nothing is pending, with outputs between a choice's first and last.
        num_awaited: number of choices whose ends the reader waits for, because it has no use for parts; 0: it takes
            outputs as they come.
    """

    def __init__(
        self, on_delta: Callable[[GenerationOutput], bool] | None = None, *, num_awaited: int = 0
    ) -> None:
        self._on_delta = on_delta
        self._takes_parts = not num_awaited
        self._num_awaited = num_awaited
        """Choices that must end before the reader wakes."""
        self._pending: list[GenerationOutput] = []
        self._last: dict[int, GenerationOutput] = {}
        """The last pending output of each choice, into which the next one is merged."""
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits."""
        self.taken_at = time.monotonic()
        """When the reader last took outputs, in monotonic seconds."""

    @property
    def num_pending(self) -> int:
        """Choices with outputs that the reader has not taken."""
        return len(self._last)

    def put(self, output: GenerationOutput) -> bool:
        """Add an output; return whether the reader is awake then, and would take what comes next apart from it."""
        if self._error is not None:
            return True  # nothing follows what is missing
        if self._on_delta is not None and self._is_delta(output):
            try:
                if self._on_delta(output):
                    self.taken_at = time.monotonic()
                    return False
            except Exception as error:  # the reader's own, as if it had met it after `take`
                self.fail(error)
                return True
        earlier = self._last.get(output.index)
        if earlier is None or earlier.num_values >= MAX_MERGED_VALUES:
            self._last[output.index] = output
            self._pending.append(output)
        else:
            earlier.merge(output)
        if self._takes_parts:
            self._wake_reader()
            return True
        if output.finish_reason is not None:
            self._num_awaited -= 1
            if self._num_awaited <= 0:
                self._wake_reader()
        return False

    def fail(self, error: Exception) -> None:
        """Have `take` raise this error once the reader has taken what came before it."""
        self._error = error
        self._wake_reader()

    async def take(self) -> list[GenerationOutput]:
        """Wait for outputs, and take everything that has arrived since the last call. Only one task may wait at a time.

        A reader that waits for complete choices takes everything once they have ended.

        Raises:
            EngineError: the request failed; parts that came before are still delivered first.
        """
        while not self._pending or self._num_awaited > 0:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self.taken_at = time.monotonic()
        outputs, self._pending = self._pending, []
        self._last.clear()
        return outputs

    def _is_delta(self, output: GenerationOutput) -> bool:
        """Whether `on_delta` may take an output."""
        is_between = output.finish_reason is None and output.num_output_tokens > len(output.token_ids)
        return is_between and self._is_reader_waiting and not self._pending and self._error is None

    @property
    def _is_reader_waiting(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class RequestState:
    """Detokenizer, counts and timings of one choice, and where its output goes.

    Args:
        index: index of the choice: in the call if there is a `queue`, else in `request_output`.
        queue: gets the output as deltas.
        request_output: accumulates the output if there is no `queue`.
        final_only: the `queue` gets tokens after the first in large pieces only (`withhold`).
    """

    __slots__ = (
        "detokenizer",
        "final_only",
        "has_output",
        "held",
        "index",
        "is_finished",
        "is_submitted",
        "num_output",
        "num_prompt",
        "num_withheld",
        "queue",
        "request_output",
        "resumed_text",
        "siblings",
        "stream_interval",
        "timings",
        "withheld",
    )

    def __init__(
        self,
        index: int,
        detokenizer: IncrementalDetokenizer,
        num_prompt: int,
        queue: OutputCollector | None,
        request_output: RequestOutput | None,
        timings: RequestTimings,
        *,
        final_only: bool = False,
    ) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.num_prompt = num_prompt
        """Number of prompt tokens."""
        self.queue = queue
        self.request_output = request_output
        self.num_output = 0
        """Number of output tokens, including those of a run that this one continues."""
        self.has_output = False
        self.is_finished = False
        """Whether the request resumes a run that had ended, so that there is nothing to compute."""
        self.is_submitted = False
        """Whether the request was sent to the core."""
        self.resumed_text = ""
        self.siblings: Sequence[EngineCoreRequest] = ()
        """Other choices of the same prompt, which are sent to the core once this one has computed it."""
        self.timings = timings
        self.final_only = final_only
        self.stream_interval = 1
        """Tokens in each output for the `queue`, but the first and the last."""
        self.held: GenerationOutput | None = None
        """Fewer tokens than that, which wait for the next ones."""
        self.withheld: list[EngineCoreOutput] = []
        """Outputs that were counted, but neither decoded nor delivered yet."""
        self.num_withheld = 0
        """Tokens in them."""

    def withhold(self, output: EngineCoreOutput) -> bool:
        """Keep an output for later, if its reader waits for the last one and few are kept; return whether it is kept.

        Not one that tells of the prompt, nor the first one of a run that continues another.
        """
        if not self.final_only or output.finish_reason is not None or self.num_withheld >= MAX_WITHHELD:
            return False
        if output.prompt_logprobs is not None or self.resumed_text:
            return False
        self.withheld.append(output)
        self.num_withheld += len(output.new_token_ids)
        return True

    def release(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return an output with the tokens before it that were withheld."""
        if not self.withheld:
            return output
        self.withheld.append(output)
        withheld, self.withheld, self.num_withheld = self.withheld, [], 0
        token_ids = [token_id for each in withheld for token_id in each.new_token_ids]
        logprobs = [entry for each in withheld for entry in each.logprobs or ()]
        return msgspec.structs.replace(output, new_token_ids=token_ids, logprobs=logprobs or None)

    def without_tokens_past_stop(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return an output up to the token that completed a stop string, and count no others."""
        num_past = self.detokenizer.num_past_stop
        if not num_past or not output.new_token_ids:
            return output
        self.num_output -= num_past
        num_kept = len(output.new_token_ids) - num_past
        return msgspec.structs.replace(
            output,
            new_token_ids=output.new_token_ids[:num_kept],
            logprobs=output.logprobs and output.logprobs[:num_kept],
        )

    def resume(self, token_ids: Sequence[int]) -> bool:
        """Decode the output of the run that this one continues; return whether the core has more to compute."""
        self.resumed_text = self.detokenizer.update(token_ids, is_last=False)
        self.num_output = len(token_ids) - self.detokenizer.num_past_stop
        return self.detokenizer.stop_reason is None and not self.is_finished

    def delta(
        self,
        output: EngineCoreOutput,
        text: str,
        finish_reason: str | None,
        stop_reason: int | str | None,
        is_first: bool,
    ) -> GenerationOutput:
        """Make the delta for one output of the core."""
        return GenerationOutput(
            index=self.index,
            text=text,
            token_ids=output.new_token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.timings.num_cached,
            num_output_tokens=self.num_output,
            num_unshown=self.detokenizer.num_unshown,
            resumed_text=self.resumed_text if is_first else "",
            logprobs=output.logprobs or [],
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.pooling_output,
        )

    def hold(self, output: GenerationOutput, is_first: bool) -> GenerationOutput | None:
        """Return an output for the reader, with what was held before; None while it is held."""
        if self.stream_interval == 1:
            return output
        held, self.held = self.held, None
        if held is not None:
            held.merge(output)
            output = held
        if is_first or output.finish_reason is not None or len(output.token_ids) >= self.stream_interval:
            return output
        self.held = output
        return None

    def accumulate(
        self,
        result: RequestOutput,
        output: EngineCoreOutput,
        text: str,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        """Append one output of the core to `request_output`, which is `result`."""
        choice = result.outputs[self.index]
        choice.text += text
        choice.token_ids += output.new_token_ids
        if output.logprobs:
            choice.logprobs += output.logprobs
        if self.index == 0:  # of later choices, the first one's blocks are cached
            result.num_cached_tokens = self.timings.num_cached
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = [None, *output.prompt_logprobs]
        if finish_reason is not None:
            choice.finish_reason, choice.stop_reason = finish_reason, stop_reason


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
