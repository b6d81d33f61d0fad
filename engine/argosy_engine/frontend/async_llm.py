"""AsyncLLM: runs requests on a core in another process, as async iterators.

One task reads the core's messages; the output processor puts text into each call's collector. Leaving an iterator
early, by `aclose`, an exception or cancellation, aborts the request in the core.

Several API processes may have one each, for the same cores: the first one starts the cores, the others attach to them.
They share the limits on queued requests, and fall asleep and wake up together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.checkpoint.tokenizer_files import prepare_tokenizer
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.async_core_client import AsyncClient, AsyncMPClient
from argosy_engine.core.proc.core_handle import ALONE, ClientGroup, num_balancer_columns
from argosy_engine.core.proc.data_parallel_client import DPLBAsyncMPClient
from argosy_engine.errors import EngineAsleep, EngineDead, EngineError, RequestFailed
from argosy_engine.frontend.admission import QueueLimits
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.model_source import local_model_async
from argosy_engine.frontend.observer import Choices, Observer
from argosy_engine.frontend.output_processor import GenerationOutput, OutputCollector, OutputProcessor
from argosy_engine.messages import (
    CollectiveRpc,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LoadStep,
    check_sleep_level,
)
from argosy_engine.sizing.kv_cache_sizing import check_model

logger = logging.getLogger("argosy.frontend")

SleepMode = Literal["abort", "wait"]

LOST_CHECK_S = 30.0
"""Interval, and minimum time without output, of asking the core whether it still has a request."""
_CHUNK = 128
"""Number of outputs that are processed before other tasks of the event loop run."""


class AsyncLLM:
    """
    Args:
        group: the API processes of the engine.
    """

    def __init__(
        self, client: AsyncClient, input_processor: InputProcessor, group: ClientGroup = ALONE
    ) -> None:
        self.client = client
        self._group = group
        self.config = client.config
        self.input_processor = input_processor
        self.renderer = input_processor.renderer
        self.queue_limits = QueueLimits(
            self.config.max_num_queued_reqs,
            self.config.max_num_queued_tokens,
            num_ranks=self.config.data_parallel_size,
            on_rejected=self._report_rejection,
            counters=None
            if group.counters is None
            else group.counters.after(num_balancer_columns(self.config.data_parallel_size)),
            num_processes=group.size,
        )
        self.output_processor = OutputProcessor(self.renderer.tokenizer, self.queue_limits)
        self.on_dead: Callable[[], None] | None = None
        self.on_sleep: Callable[[int, SleepMode], Awaitable[None]] | None = None
        """Called before the cores fall asleep with the level, and once they are awake with 0, so that the other API
        processes do the same (`follow_sleep`)."""
        self._dead: EngineDead | None = None
        self._last_heard = [time.monotonic()] * self.config.data_parallel_size
        """For each core the time of its last message."""
        self._prefill_tokens_per_s = [0.0] * self.config.data_parallel_size
        self._sleep_level = 0
        self._sleep_lock = asyncio.Lock()
        self._suspects: set[str] = set()
        self._reader = asyncio.create_task(self._read_outputs(), name="engine outputs")
        self._watchdog = asyncio.create_task(self._watch(), name="lost requests")

    @classmethod
    async def start(cls, args: EngineArgs, group: ClientGroup = ALONE) -> AsyncLLM:
        """Start the core and load the tokenizer, after fetching the model if it is remote.

        Args:
            group: the API processes that the core serves.

        Raises:
            ConfigError, EngineDead: the core could not start.
            FetchFailed: the model could not be fetched for now.
        """
        async with local_model_async(args) as local:
            await asyncio.to_thread(_check_before_load, local)
            client: AsyncClient
            if local.data_parallel_size == 1:
                client = await AsyncMPClient.start(local, group=group)
            else:
                client = await DPLBAsyncMPClient.start(local, group)
        return await cls._of(client, group)

    @classmethod
    async def attach(cls, clients: Sequence[AsyncMPClient], group: ClientGroup) -> AsyncLLM:
        """Use cores that another API process has started.

        Args:
            clients: one for each rank, in order (`AsyncMPClient.attach`).
            group: this process's place in it.
        """
        client = clients[0] if len(clients) == 1 else DPLBAsyncMPClient(clients, counters=group.counters)
        return await cls._of(client, group)

    @classmethod
    async def _of(cls, client: AsyncClient, group: ClientGroup) -> AsyncLLM:
        try:
            group.on_load_step(LoadStep("tokenizer"))
            return cls(client, InputProcessor(client.config), group)
        except BaseException:
            await client.close()
            raise

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the core last sent a message; of several cores the most silent one."""
        return time.monotonic() - min(self._last_heard)

    @property
    def num_live(self) -> int:
        """Number of choices that have not ended."""
        return len(self.output_processor.request_states)

    @property
    def observers(self) -> list[Observer]:
        """Observers of all outputs."""
        return self.output_processor.observers

    def _report_rejection(self, limit: str, rank: int | None) -> None:
        for observer in self.observers:
            observer.on_rejected(limit, rank or 0)

    async def generate(
        self,
        requests: Sequence[EngineCoreRequest],
        n: int = 1,
        finished: Container[int] = (),
        on_delta: Callable[[GenerationOutput], bool] | None = None,
    ) -> AsyncGenerator[list[GenerationOutput]]:
        """Run the requests of one call; outputs carry the request's index.

        Args:
            requests: for each prompt of a batch its `n` choices. A prompt of at least one KV block is computed by its
                first choice; the others follow once it is, and find it in the prefix cache.
            finished: indexes of resumed requests that had ended; they end again without being computed.
            on_delta: takes outputs that need no turn of the reader (`OutputCollector`).

        Raises:
            EngineDead: the core died.
            EngineBusy: too many requests are in flight, in the engine or in the rank that they choose, or it is asleep.
            EngineError: the core refused a request.
        """
        collector, unfinished = OutputCollector(on_delta), len(requests)
        self._expect(requests, n, finished, collector)
        try:
            await self._submit_call(requests, n)
            while unfinished:
                outputs = await collector.take()
                unfinished -= sum(output.finish_reason is not None for output in outputs)
                self._report_hits(requests, n, outputs)
                yield outputs
        finally:
            await self._leave(requests)

    async def collect(self, requests: Sequence[EngineCoreRequest], n: int = 1) -> list[GenerationOutput]:
        """Run the requests of one call and return their complete outputs, by index (`generate`)."""
        for request in requests:
            # A stop string is found in the text of each token, and ends the computation.
            request.final_only = not request.sampling_params.stop
        collector = OutputCollector(num_awaited=len(requests))
        self._expect(requests, n, (), collector)
        try:
            await self._submit_call(requests, n)
            outputs = await collector.take()
        finally:
            await self._leave(requests)
        self._report_hits(requests, n, outputs)
        if len(requests) == len(outputs) == 1:
            return outputs
        merged = [GenerationOutput(index) for index in range(len(requests))]
        for output in outputs:
            merged[output.index].merge(output)
        return merged

    def _expect(
        self,
        requests: Sequence[EngineCoreRequest],
        n: int,
        finished: Container[int],
        collector: OutputCollector,
    ) -> None:
        """Have the outputs of a call delivered to a collector, if the limits have room for it.

        Raises:
            EngineDead, EngineBusy: as `generate`.
        """
        if self._dead is not None:
            raise self._dead
        if self._sleep_level:
            raise EngineAsleep("this engine is asleep")
        # The choices of a prompt compute it once.
        num_tokens = sum(len(leader.prompt_token_ids) for leader in requests[::n])
        self.queue_limits.check(len(requests), num_tokens, requests[0].data_parallel_rank)
        for index, request in enumerate(requests):
            if index % n:
                num_queued_tokens = 0
            else:
                num_queued_tokens, choices = len(request.prompt_token_ids), Choices(n)
            state = self.output_processor.add_request(
                request, index, queue=collector, num_queued_tokens=num_queued_tokens, choices=choices
            )
            state.is_finished = index in finished
        _group_into_call(requests, n)

    async def _submit_call(self, requests: Sequence[EngineCoreRequest], n: int) -> None:
        """Send the requests of a call to the core that need not wait for others of it."""
        for request in self._leaders(requests, n):
            await self._submit(request)

    async def _leave(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Abort what has not ended of a call whose reader has what it wants, or is gone."""
        leftover = [
            request.request_id
            for request in requests
            if self.output_processor.finish(request.request_id, "abort")
        ]
        if leftover and self._dead is None:
            await self.client.abort_requests(leftover)

    def _report_hits(
        self, requests: Sequence[EngineCoreRequest], n: int, outputs: Sequence[GenerationOutput]
    ) -> None:
        """Tell the observers of cached prefixes, with the first output of each prompt."""
        for output in outputs:
            is_first = output.num_output_tokens == len(output.token_ids) and not output.index % n
            if is_first and output.num_cached_tokens:
                for observer in self.observers:
                    observer.on_prefix_hit(requests[output.index], output.num_cached_tokens)

    def _leaders(self, requests: Sequence[EngineCoreRequest], n: int) -> Iterator[EngineCoreRequest]:
        """Return the requests to submit now. Each of the others waits until one of these has computed their prompt."""
        for start in range(0, len(requests), n):
            leader, *siblings = requests[start : start + n]
            yield leader
            # Log probabilities of the prompt come with its first output.
            wants_prompt = leader.sampling_params.prompt_logprobs is not None
            is_short = len(leader.prompt_token_ids) < self.config.block_size and not wants_prompt
            state = self.output_processor.request_states.get(leader.request_id)
            if is_short or state is None:  # it has already ended
                yield from siblings
            else:
                state.siblings = siblings
                for sibling in siblings:
                    sibling.batch_offset = 0  # they are submitted when their prompt is computed

    async def _submit(self, request: EngineCoreRequest) -> None:
        """Send a request to the core, unless it continues a run that has nothing left to compute."""
        state = self.output_processor.request_states.get(request.request_id)
        if state is None:
            return  # the client left
        if state.resume(request.resume_token_ids):
            await self.client.add_request(request)
            state.timings.engine_index = request.data_parallel_rank or 0
            self.queue_limits.place(request.request_id, state.timings.engine_index)
            state.is_submitted = True
        else:
            ended = EngineCoreOutput(request.request_id, [], FinishReason.STOP)
            await self._process_outputs([ended])

    async def drain(self) -> None:
        """Wait until every request has ended."""
        await self.output_processor.requests_drained.wait()

    @property
    def sleep_level(self) -> int:
        """Current sleep level; 0 is awake."""
        return self._sleep_level

    @property
    def is_sleeping(self) -> bool:
        return self._sleep_level > 0

    async def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Free weights and KV cache; requests are rejected until `wake_up`.

        Args:
            level: 1 leaves the checkpoint in the page cache for a fast wake-up, 2 drops it, too.
            mode: what happens to running requests.

        Raises:
            UtilityFailed: there is no such level, or another API process does not follow; the engine stays awake.
        """
        check_sleep_level(level)
        async with self._sleep_lock:
            before, self._sleep_level = self._sleep_level, level
            try:
                await asyncio.gather(self._end_requests(mode), self._tell_others(level, mode))
                await self.client.call_utility("sleep", level)
            except BaseException:
                self._sleep_level = before
                await self._tell_others(before, "wait")
                raise

    async def follow_sleep(self, level: int, mode: SleepMode) -> None:
        """Reject requests from now on, and end those that run, because another API process puts the cores to sleep; or
        accept them again.

        Args:
            level: 0 if the cores are awake.
        """
        self._sleep_level = level
        if level:
            await self._end_requests(mode)
            # What was sent before the call, such as aborts, has been handled once it is answered.
            await self.client.call_utility("unknown_requests", [])

    async def _end_requests(self, mode: SleepMode) -> None:
        if mode == "abort":
            error = EngineAsleep("the engine was put to sleep while it was working on this request")
            await self.client.abort_requests(self.output_processor.fail_all(error, "abort"))
        await self.drain()

    async def _tell_others(self, level: int, mode: SleepMode) -> None:
        if self.on_sleep is not None:
            await self.on_sleep(level, mode)

    async def wake_up(self) -> None:
        """Load the weights again.

        Raises:
            UtilityFailed: they no longer fit, or the checkpoint is gone; the engine stays asleep.
        """
        async with self._sleep_lock:
            await self.client.call_utility("wake_up")
            self._sleep_level = 0
            await self._tell_others(0, "wait")

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False and has no effect while requests hold blocks; of several cores, those
        without requests drop theirs all the same."""
        return bool(await self.client.call_utility("reset_prefix_cache"))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a public method of every worker, and return the results by rank (`Executor.collective_rpc`).

        Raises:
            UtilityFailed: there is no such method, it failed, or it timed out.
        """
        call = CollectiveRpc(method, timeout, list(args), dict(kwargs or {}))
        return list(await self.client.call_utility("collective_rpc", call))

    async def close(self) -> None:
        """End the core. Running requests fail, so that no reader waits for ever."""
        tasks = self._reader, self._watchdog
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_running(EngineDead("the engine was shut down"))
        self.input_processor.close()
        await self.client.close()

    async def _watch(self) -> None:
        while self._dead is None:
            await asyncio.sleep(LOST_CHECK_S)
            try:
                await self.fail_lost()
            except EngineError as error:
                logger.warning("the core does not tell which requests it has: %s", error)

    async def fail_lost(self, silent_s: float = LOST_CHECK_S) -> int:
        """Fail the requests that the core did not know in this call and the previous one; return how many.

        One call is not enough, because the message that ends a request may still be in transit.

        Args:
            silent_s: ask only for requests without output for this long.

        Raises:
            EngineDead, UtilityFailed: the core does not answer.
        """
        silent = self.output_processor.silent_requests(silent_s)
        unknown = set(await self.client.call_utility("unknown_requests", silent)) if silent else set[str]()
        lost = [
            request_id
            for request_id in unknown & self._suspects
            if request_id in self.output_processor.request_states
        ]
        self._suspects = unknown
        for request_id in lost:
            logger.error("the core has lost request %s", request_id)
            state = self.output_processor.fail(request_id, RequestFailed("the engine lost this request"))
            assert state is not None
            for observer in self.observers:
                observer.on_lost(state.timings)
        if lost:
            await self.client.abort_requests(lost)  # the client may still count them
        return len(lost)

    def describe(self) -> str:
        """Describe the ages of requests and readers for the log, without any text, in bounded size."""
        now = time.monotonic()
        ages = ", ".join(f"{now - heard:.3f} s" for heard in self._last_heard)
        lines = [
            f"state of the API: live={self.num_live} sleep_level={self._sleep_level} dead={self.is_dead} "
            f"core last heard {ages} ago"
        ]
        return "\n".join(lines + self.output_processor.describe())

    async def _read_outputs(self) -> None:
        num_unseen = 0  # messages and outputs since other tasks could last run
        try:
            async with aclosing(self.client.outputs()) as messages:
                async for outputs in messages:
                    self._last_heard[outputs.engine_index] = time.monotonic()
                    for observer in self.observers:
                        observer.on_core_outputs(outputs)
                    if outputs.stats is not None:
                        rates = self._prefill_tokens_per_s
                        rates[outputs.engine_index] = outputs.stats.prefill_tokens_per_s
                        self.queue_limits.prefill_tokens_per_s = sum(rates)
                    is_awaited = await self._process_outputs(outputs.outputs, outputs.timestamp)
                    num_unseen += 1 + len(outputs.outputs)
                    # Readers that are awake take each step's tokens as events of their own.
                    if is_awaited or num_unseen >= _CHUNK:
                        num_unseen = 0
                        await asyncio.sleep(0)
        except EngineDead as error:
            self._die(error)
        except Exception as error:
            logger.exception("reading the core's outputs failed")
            self._die(EngineDead(f"{type(error).__name__}: {error}"))

    async def _process_outputs(self, outputs: Sequence[EngineCoreOutput], timestamp: float = 0.0) -> bool:
        """Deliver outputs to their readers, then tell the core which requests to abort and which to add.

        Returns:
            whether a reader has something to take.
        """
        is_awaited = False
        aborts: list[str] = []
        adds: list[EngineCoreRequest] = []
        for start in range(0, len(outputs), _CHUNK):
            processed = self.output_processor.process_outputs(outputs[start : start + _CHUNK], timestamp)
            is_awaited = is_awaited or processed.is_awaited
            aborts += processed.reqs_to_abort
            adds += processed.reqs_to_add
            if start + _CHUNK < len(outputs):
                await asyncio.sleep(0)
        if aborts:
            await self.client.abort_requests(aborts)
        for request in adds:
            await self._submit(request)
        return is_awaited

    def _die(self, error: EngineDead) -> None:
        # The process that has started the core knows why it ended.
        logger.log(logging.INFO if self._group.index else logging.ERROR, "engine core dead: %s", error)
        self._fail_running(error)
        if self.on_dead is not None:
            self.on_dead()

    def _fail_running(self, error: EngineDead) -> None:
        self._dead = error
        self.output_processor.fail_all(EngineDead("the engine stopped while it was working on this request"))


def _check_before_load(args: EngineArgs) -> None:
    """Refuse what the core and this process would refuse, the latter only after the weights are loaded.

    Raises:
        ConfigError: config.json or flags do not allow it, or there is no tokenizer that can be read.
    """
    check_model(args)
    prepare_tokenizer(args.tokenizer_path or resolve_model(args.model), args.tokenizer_mode)


def _group_into_call(requests: Sequence[EngineCoreRequest], n: int) -> None:
    """Group the sequences of a call, so that it shares slots and turns fairly with other calls."""
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
