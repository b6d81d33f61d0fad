"""AsyncLLM: requests over a core in another process, as async iterators.

One task reads the core's outputs, turns tokens into text and hands them to each request's collector. Leaving an
iterator early, by `aclose`, an exception or cancellation, aborts the request in the core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal

from argosy_engine.config import EngineArgs
from argosy_engine.core.async_client import AsyncMPClient
from argosy_engine.core.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
)
from argosy_engine.errors import (
    EngineAsleep,
    EngineBusy,
    EngineDead,
    EngineError,
    InvalidRequest,
    RequestFailed,
)
from argosy_engine.frontend.admission import AdmissionControl
from argosy_engine.frontend.detokenizer import IncrementalDetokenizer
from argosy_engine.frontend.outputs import GenerationOutput, OutputCollector
from argosy_engine.frontend.processor import InputProcessor

logger = logging.getLogger("argosy.frontend")

LOST_CHECK_S = 30.0
"""How often, and after how long a silence, the core is asked whether it still has a request."""
MAX_DESCRIBED = 64
"""Requests listed in a description; the rest is counted."""
_CHUNK = 128
"""Outputs processed before other tasks of the loop get their turn."""


class RequestTimings:
    """When a request reached its milestones, in monotonic seconds; read by the metrics."""

    __slots__ = ("arrived", "first_token", "last_token", "num_cached", "prefill_s", "queued_s")

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        self.first_token = 0.0
        self.last_token = 0.0
        self.num_cached = 0
        self.queued_s = 0.0
        self.prefill_s = 0.0


class _Live:
    """A request in the core: its detokenizer, its reader, its counts."""

    __slots__ = (
        "collector",
        "detokenizer",
        "has_output",
        "index",
        "is_finished",
        "is_submitted",
        "num_output",
        "num_prompt",
        "resumed_text",
        "siblings",
        "timings",
    )

    def __init__(
        self, index: int, collector: OutputCollector, detokenizer: IncrementalDetokenizer, num_prompt: int
    ) -> None:
        self.index = index
        self.collector = collector
        self.detokenizer = detokenizer
        self.num_prompt = num_prompt
        self.num_output = 0
        """tokens, those of a run that this one continues included"""
        self.has_output = False
        self.is_finished = False
        """before it began: it resumes a run that had ended"""
        self.is_submitted = False
        """Whether the core was told of it."""
        self.resumed_text = ""
        self.siblings: Sequence[EngineCoreRequest] = ()
        """Other choices of the same prompt, which wait for this one to compute it."""
        self.timings = RequestTimings()


class Observer:
    """What wants to know about outputs as they pass: metrics and telemetry subclass it."""

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None: ...

    def on_lost(self, count: int) -> None:
        """Requests were failed that the core no longer knew."""

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None: ...

    def on_finished(self, timings: RequestTimings, num_prompt: int, num_output: int, reason: str) -> None:
        """A request ended, however it did: every one that began is told once.

        Args:
            reason: a finish reason; `abort` if its client left or the engine was told to drop it, `error` if it failed.
        """


class AsyncLLM:
    def __init__(self, client: AsyncMPClient, processor: InputProcessor) -> None:
        self.client = client
        self.config = client.config
        self.processor = processor
        self.admission = AdmissionControl(self.config.max_num_queued_reqs, self.config.max_num_queued_tokens)
        self.observers: list[Observer] = []
        self.on_dead: Callable[[], None] | None = None
        self._live: dict[str, _Live] = {}
        self._dead: EngineDead | None = None
        self._last_heard = time.monotonic()
        self._sleep_level = 0
        self._sleep_lock = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._suspects: set[str] = set()
        self._reader = asyncio.create_task(self._read_outputs(), name="engine outputs")
        self._watchdog = asyncio.create_task(self._watch(), name="lost requests")

    @classmethod
    async def start(cls, args: EngineArgs) -> AsyncLLM:
        """Starts the core and loads the tokenizer.

        Raises:
            ConfigError, EngineDead: the core could not start.
        """
        client = await AsyncMPClient.start(args)
        try:
            return cls(client, InputProcessor(client.config))
        except BaseException:
            await client.close()
            raise

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the core last said anything."""
        return time.monotonic() - self._last_heard

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def generate(
        self, requests: Sequence[EngineCoreRequest], n: int = 1, finished: Container[int] = ()
    ) -> AsyncGenerator[list[GenerationOutput]]:
        """Runs the requests of one call; outputs carry the request's index.

        Args:
            requests: for each prompt of a batch its `n` choices. A prompt of at least one KV block is computed by its
                first choice; the others follow once it is, and find it in the prefix cache.
            finished: indexes of resumed requests that have nothing more to say; they end without being computed.

        Raises:
            EngineDead: the core died.
            EngineBusy: too many requests are in flight, or the engine is asleep.
            EngineError: the core refused a request.
        """
        if self._dead is not None:
            raise self._dead
        if self._sleep_level:
            raise EngineAsleep("this engine is asleep")
        # The choices of a prompt compute it once.
        self.admission.check(len(requests), sum(len(leader.prompt_token_ids) for leader in requests[::n]))
        collector = OutputCollector()
        for index, request in enumerate(requests):
            self.admission.enter(request.request_id, 0 if index % n else len(request.prompt_token_ids))
            detokenizer = IncrementalDetokenizer(
                self.processor.tokenizer, request.sampling_params, request.prompt_token_ids
            )
            live = _Live(index, collector, detokenizer, len(request.prompt_token_ids))
            live.is_finished = index in finished
            self._live[request.request_id] = live
        self._idle.clear()
        unfinished = len(requests)
        _set_turns(requests, n)
        try:
            for request in self._leaders(requests, n):
                await self._submit(request)
            while unfinished:
                outputs = await collector.take()
                unfinished -= sum(output.finish_reason is not None for output in outputs)
                yield outputs
        finally:
            leftover = [request.request_id for request in requests if self._end(request.request_id, "abort")]
            if leftover and self._dead is None:
                await self.client.abort_requests(leftover)

    def _leaders(self, requests: Sequence[EngineCoreRequest], n: int) -> Iterator[EngineCoreRequest]:
        """The requests to submit now; the others are left to one of these."""
        for start in range(0, len(requests), n):
            leader, *siblings = requests[start : start + n]
            yield leader
            wants_prompt = (
                leader.sampling_params.prompt_logprobs is not None
            )  # which come with its first output
            is_short = len(leader.prompt_token_ids) < self.config.block_size and not wants_prompt
            live = self._live.get(leader.request_id)
            if is_short or live is None:  # it is over already
                yield from siblings
            else:
                live.siblings = siblings
                for sibling in siblings:
                    sibling.batch_offset = 0  # their turn is when their prompt is computed

    async def _submit(self, request: EngineCoreRequest) -> None:
        """Sends a request to the core; one that continues an earlier run takes up its text first."""
        live = self._live.get(request.request_id)
        if live is None:
            return  # the client left
        live.num_output = len(request.resume_token_ids)
        live.resumed_text = live.detokenizer.update(request.resume_token_ids, is_last=False)
        if live.detokenizer.stop_reason is None and not live.is_finished:
            await self.client.add_request(request)
            live.is_submitted = True
        else:
            ended = EngineCoreOutput(request.request_id, [], FinishReason.STOP)
            await self._process_all([ended])

    async def drain(self) -> None:
        """Waits until no request is live."""
        await self._idle.wait()

    @property
    def sleep_level(self) -> int:
        """0: awake."""
        return self._sleep_level

    @property
    def is_sleeping(self) -> bool:
        return self._sleep_level > 0

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait"] = "abort") -> None:
        """Gives weights and KV cache back; requests are refused until `wake_up`.

        Args:
            level: 1 leaves the checkpoint in the page cache for a quick return, 2 drops that too.
            mode: what happens to running requests.

        Raises:
            UtilityFailed: there is no such level.
        """
        async with self._sleep_lock:
            before, self._sleep_level = self._sleep_level, level
            try:
                if mode == "abort":
                    error = EngineAsleep("the engine was put to sleep while it was working on this request")
                    await self.client.abort_requests(self._fail_all(error, "abort"))
                await self.drain()
                await self.client.call_utility("sleep", level)
            except BaseException:
                self._sleep_level = before
                raise

    async def wake_up(self) -> None:
        """Loads the weights again.

        Raises:
            UtilityFailed: they no longer fit, or the checkpoint is gone; the engine stays asleep.
        """
        async with self._sleep_lock:
            await self.client.call_utility("wake_up")
            self._sleep_level = 0

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and no effect, while requests hold blocks."""
        return bool(await self.client.call_utility("reset_prefix_cache"))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a public method of every worker; the results by rank (`Executor.collective_rpc`).

        Raises:
            UtilityFailed: there is no such method, it failed, or its time is up.
        """
        call = method, timeout, list(args), dict(kwargs or {})
        return list(await self.client.call_utility("collective_rpc", *call))

    async def close(self) -> None:
        """Ends the core; requests that are still live fail, so that nobody waits for it."""
        tasks = self._reader, self._watchdog
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_live(EngineDead("the engine was shut down"))
        await self.client.close()

    async def _watch(self) -> None:
        while self._dead is None:
            await asyncio.sleep(LOST_CHECK_S)
            try:
                await self.fail_lost()
            except EngineError as error:
                logger.warning("the core does not tell which requests it has: %s", error)

    async def fail_lost(self, silent_s: float = LOST_CHECK_S) -> int:
        """Fails requests that the core did not know in this call and the one before; how many. One look is not enough:
        what tells of the end of a request may be on its way.

        Args:
            silent_s: asks for those only that have had no output for so long.

        Raises:
            EngineDead, UtilityFailed: the core does not answer.
        """
        now = time.monotonic()
        silent = [
            request_id
            for request_id, live in self._live.items()
            if live.is_submitted and now - max(live.timings.arrived, live.timings.last_token) >= silent_s
        ]
        unknown = set(await self.client.call_utility("unknown_requests", silent)) if silent else set[str]()
        lost = [request_id for request_id in unknown & self._suspects if request_id in self._live]
        self._suspects = unknown
        for request_id in lost:
            logger.error("the core has lost request %s", request_id)
            self._fail(request_id, RequestFailed("the engine lost this request"))
        if lost:
            for observer in self.observers:
                observer.on_lost(len(lost))
        return len(lost)

    def describe(self) -> str:
        """Ages of requests and readers, for the log; no text, bounded."""
        now = time.monotonic()
        lines = [
            f"state of the API: live={len(self._live)} sleep_level={self._sleep_level} dead={self.is_dead} "
            f"core last heard {self.heartbeat_age_s:.3f} s ago"
        ]
        for request_id, live in list(self._live.items())[:MAX_DESCRIBED]:
            timings, collector = live.timings, live.collector
            silent_s = now - max(timings.arrived, timings.last_token)
            lines.append(
                f"    {request_id}: age={now - timings.arrived:.1f}s silent={silent_s:.1f}s "
                f"submitted={live.is_submitted} siblings={len(live.siblings)} output={live.num_output} "
                f"reader: pending={collector.num_pending} last took {now - collector.taken_at:.1f} s ago"
            )
        if len(self._live) > MAX_DESCRIBED:
            lines.append(f"    and {len(self._live) - MAX_DESCRIBED} more")
        return "\n".join(lines)

    async def _read_outputs(self) -> None:
        try:
            async for outputs in self.client.outputs():
                self._last_heard = time.monotonic()
                for observer in self.observers:
                    observer.on_core_outputs(outputs)
                if outputs.stats is not None:
                    self.admission.prefill_tokens_per_s = outputs.stats.prefill_tokens_per_s
                await self._process_all(outputs.outputs)
        except EngineDead as error:
            self._die(error)
        except Exception as error:
            logger.exception("reading the core's outputs failed")
            self._die(EngineDead(f"{type(error).__name__}: {error}"))

    async def _process_all(self, outputs: Sequence[EngineCoreOutput]) -> None:
        aborts: list[str] = []
        adds: list[EngineCoreRequest] = []
        for start in range(0, len(outputs), _CHUNK):
            for output in outputs[start : start + _CHUNK]:
                try:
                    self._process(output, aborts, adds)
                except Exception:
                    logger.exception("processing the output of request %s failed", output.request_id)
                    self._fail(
                        output.request_id, RequestFailed("the engine could not process its own output")
                    )
                    aborts.append(output.request_id)
            if start + _CHUNK < len(outputs):
                await asyncio.sleep(0)
        if aborts:
            await self.client.abort_requests(aborts)
        for request in adds:
            await self._submit(request)

    def _process(self, output: EngineCoreOutput, aborts: list[str], adds: list[EngineCoreRequest]) -> None:
        """Turns one output into text for its reader; collects what the core is to abort and to add."""
        live = self._live.get(output.request_id)
        if live is None:
            return  # aborted meanwhile
        if output.finish_reason is FinishReason.ERROR:
            self._fail(output.request_id, request_error(output))
            return
        timings, now = live.timings, time.monotonic()
        if output.prefill_stats is not None:
            # Of a resumed request, output may have been cached too.
            timings.num_cached = min(output.prefill_stats.num_cached_tokens, live.num_prompt)
            timings.queued_s, timings.prefill_s = (
                output.prefill_stats.queued_s,
                output.prefill_stats.prefill_s,
            )
        is_first, live.has_output = not live.has_output, True
        adds += live.siblings
        live.siblings = ()
        live.num_output += len(output.new_token_ids)
        text = live.detokenizer.update(
            output.new_token_ids,
            output.finish_reason is not None,
            ends_at_stop_token=output.finish_reason is FinishReason.STOP,
        )
        reason = None if output.finish_reason is None else str(output.finish_reason)
        stop_reason: int | str | None = output.stop_reason
        if live.detokenizer.stop_reason is not None:
            if reason is None:
                aborts.append(output.request_id)
            reason, stop_reason = str(FinishReason.STOP), live.detokenizer.stop_reason
        for observer in self.observers:
            observer.on_tokens(timings, len(output.new_token_ids), now, is_first)
        if is_first:
            timings.first_token = now
            self.admission.start(output.request_id)
        timings.last_token = now
        if reason is not None:
            self._end(output.request_id, reason)
        live.collector.put(
            GenerationOutput(
                index=live.index,
                text=text,
                token_ids=output.new_token_ids,
                finish_reason=reason,
                stop_reason=stop_reason,
                num_prompt_tokens=live.num_prompt,
                num_cached_tokens=timings.num_cached,
                num_output_tokens=live.num_output,
                resumed_text=live.resumed_text if is_first else "",
                logprobs=output.logprobs or [],
                prompt_logprobs=output.prompt_logprobs,
                embedding=output.pooling_output,
            )
        )

    def _end(self, request_id: str, reason: str) -> _Live | None:
        """Forgets a request and tells the observers; None if it was no longer live."""
        live = self._live.pop(request_id, None)
        if not self._live:
            self._idle.set()
        if live is not None:
            self.admission.leave(request_id)
            for observer in self.observers:
                observer.on_finished(live.timings, live.num_prompt, live.num_output, reason)
        return live

    def _die(self, error: EngineDead) -> None:
        logger.error("engine core dead: %s", error)
        self._fail_live(error)
        if self.on_dead is not None:
            self.on_dead()

    def _fail_live(self, error: EngineDead) -> None:
        self._dead = error
        self._fail_all(EngineDead("the engine stopped while it was working on this request"))

    def _fail_all(self, error: EngineError, reason: str = "error") -> list[str]:
        """Fails every live request; their ids."""
        request_ids = list(self._live)
        for request_id in request_ids:
            self._fail(request_id, error, reason)
        return request_ids

    def _fail(self, request_id: str, error: EngineError, reason: str = "error") -> None:
        live = self._end(request_id, reason)
        if live is not None:
            live.collector.fail(error)


def _set_turns(requests: Sequence[EngineCoreRequest], n: int) -> None:
    """Has a call of several sequences, `n` choices of each prompt, share its seats and its turns with other calls."""
    if len(requests) > 1:
        for request in requests:
            request.call_id = requests[0].request_id
    if len(requests) <= n:
        return
    offset = 0
    for index, request in enumerate(requests):
        if index % n == 0:
            offset += len(request.prompt_token_ids)
        request.batch_offset = offset


def request_error(output: EngineCoreOutput) -> EngineError:
    """Why the core could not run a request."""
    message = output.error or "the engine could not run this request"
    match output.error_kind:
        case ErrorKind.INVALID:
            return InvalidRequest(message, param="prompt")
        case ErrorKind.INVALID_GRAMMAR:
            return InvalidRequest(message, param="grammar")
        case ErrorKind.BUSY:
            return EngineBusy(message)
        case ErrorKind.INTERNAL:
            return RequestFailed(message)
