"""The engine as its server sees it: its states from loading to drained, and what exists only once it is loaded.

Owns: the states, and the count of accepted requests that a drain waits for. Must not know: routes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Literal, Protocol

from argosy_engine.api.error_translation import translated_error
from argosy_engine.api.observability.load_report import LoadReport
from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_engine.api.observability.prefix_hits import PrefixHits
from argosy_engine.api.observability.request_records import RecordedOutputs
from argosy_engine.api.observability.stats_log import StatsLog
from argosy_engine.api.observability.telemetry import TelemetryHub
from argosy_engine.api.openai.openai_serving import OpenAIServing
from argosy_engine.api.responses.background_runs import BackgroundRuns
from argosy_engine.api.responses.response_store import InMemoryResponseStore
from argosy_engine.api.server_args import ITERATION_TIMEOUT_S, ServerArgs
from argosy_engine.frontend.async_llm import AsyncLLM, SleepMode
from argosy_engine.frontend.observer import Observer
from argosy_protocol.errors import (
    TooManyRequests,
    Unavailable,
)

_ASLEEP_RETRY_S = 10.0
"""Retry-After of a sleeping engine. When it wakes up is unknown; the router tries other replicas meanwhile."""

_DEFAULT_OPTIONS = ServerArgs()


class Peers(Protocol):
    """The engine's other API processes, as the first one sees them."""

    async def drain(self) -> None: ...

    async def metric_values(self) -> list[list[float]]: ...

    async def sleep(self, level: int, mode: SleepMode) -> None: ...


class _AcceptedRequests:
    """Context in which accepted requests run; each of them enters it."""

    def __init__(self) -> None:
        self.count = 0
        self.none_left = asyncio.Event()
        self.none_left.set()

    def __enter__(self) -> None:
        self.count += 1
        self.none_left.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self.none_left.set()


class Engine:
    """The application's state. `llm` and what depends on it exist once the model is loaded."""

    def __init__(
        self,
        names: tuple[str, ...],
        iteration_timeout_s: float = ITERATION_TIMEOUT_S,
        *,
        takes_any_name: bool = False,
        options: ServerArgs = _DEFAULT_OPTIONS,
        spans: Observer | None = None,
        started: int | None = None,
        root: str = "",
    ) -> None:
        """
        Args:
            root: what `/v1/models` calls the model that all names stand for; empty: the first of `names`.
            spans: makes spans of requests; None: nobody does.
            started: when, in seconds since the epoch; None: now.
        """
        self.names = names
        self._root = root
        self.started = int(time.time()) if started is None else started
        """When, in seconds since the epoch; the same in all API processes."""
        self.takes_any_name = takes_any_name
        self.options = options
        self._spans = spans
        self.iteration_timeout_s = iteration_timeout_s
        self.peers: Peers | None = None
        """Set in the first of several API processes."""
        self.phase = "starting"
        self.is_draining = False
        self.llm: AsyncLLM | None = None
        self._serving: OpenAIServing | None = None
        self._metrics: EngineMetrics | None = None
        self._load_report: LoadReport | None = None
        self._telemetry: TelemetryHub | None = None
        self._is_warming_up = False
        self._started = asyncio.Event()
        """Set when the start is over: the engine is ready, or drains."""
        self.prefix_hits = PrefixHits()
        """The hottest prefixes, for new replicas."""
        self._accepted = _AcceptedRequests()
        self.responses = BackgroundRuns(InMemoryResponseStore(), self.accepted, translated_error)

    def attach(self, llm: AsyncLLM, *, publishes: bool = True, is_warming_up: bool = False) -> None:
        """Serve a loaded model.

        Args:
            publishes: whether this process tells routers and the log of the cores' load; one of several does.
            is_warming_up: it answers requests, but is not ready before `warmed_up`.
        """
        self._serving = OpenAIServing(
            llm,
            self.names,
            takes_any_name=self.takes_any_name,
            generates=llm.config.pooling is None,
            created=self.started,
            root=self._root,
        )
        self._metrics = EngineMetrics(llm.config)
        self._load_report = LoadReport(llm.config.data_parallel_size)
        self.prefix_hits = PrefixHits(block_size=llm.config.block_size)
        llm.observers.extend((self._metrics, self._load_report, self.prefix_hits))
        if self.options.access_log:
            llm.observers.append(RecordedOutputs())
        if self._spans is not None:
            llm.observers.append(self._spans)
        if publishes:
            self._telemetry = TelemetryHub(llm, llm.config)
            llm.observers.append(self._telemetry)
            if not self.options.disable_log_stats:
                llm.observers.append(StatsLog(llm.config.data_parallel_size))
        if self.peers is not None:
            llm.on_sleep = self.peers.sleep
        self.llm = llm
        self._is_warming_up = is_warming_up
        self.phase = "warming up" if is_warming_up else "ready"
        if not is_warming_up:
            self._started.set()

    def warmed_up(self) -> None:
        """Be ready."""
        self._is_warming_up = False
        self._started.set()
        if not self.is_draining:
            self.phase = "ready"

    @property
    def is_ready(self) -> bool:
        is_open = not self.is_draining and not self.is_sleeping and not self._is_warming_up
        return self.llm is not None and is_open and self.is_healthy

    async def wait_started(self, timeout_s: float) -> None:
        """Return once the engine is ready or drains, at the latest after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._started.wait()

    @property
    def is_sleeping(self) -> bool:
        return self.llm is not None and self.llm.is_sleeping

    @property
    def status(self) -> str:
        """Status in the body of /ready: loading, warming up, ready, sleeping or draining."""
        return "sleeping" if self.phase == "ready" and self.is_sleeping else self.phase

    @property
    def is_healthy(self) -> bool:
        """Whether the core lives and its loop runs; a core that is still loading counts as healthy."""
        llm = self.llm
        return llm is None or (not llm.is_dead and llm.heartbeat_age_s < self.iteration_timeout_s)

    @property
    def loaded(self) -> AsyncLLM:
        """The model. Raises Unavailable while it loads or the engine drains; a sleeping engine is loaded."""
        if self.llm is None:
            raise Unavailable(f"the model is loading ({self.phase})", retry_after_s=1.0)
        if self.is_draining:
            raise Unavailable("this engine is shutting down", retry_after_s=1.0)
        return self.llm

    @property
    def serving(self) -> OpenAIServing:
        """The endpoints' model. Raises Unavailable while it loads, and while the engine sleeps or drains."""
        if self._serving is None:
            raise Unavailable(f"the model is loading ({self.phase})", retry_after_s=1.0)
        if self.is_draining:
            raise Unavailable("this engine is shutting down", retry_after_s=1.0)
        if self.is_sleeping:
            raise Unavailable("this engine is asleep", retry_after_s=_ASLEEP_RETRY_S)
        return self._serving

    def on_slow_client(self) -> None:
        """Count a client that was disconnected because it did not read its response."""
        if self._metrics is not None:
            self._metrics.on_slow_client()

    async def render_metrics(self) -> bytes:
        """Return the text of the metrics, of all API processes; empty while the model loads."""
        if self._metrics is None or self.llm is None:
            return b""
        self._metrics.set_sleep_level(self.llm.sleep_level)
        return self._metrics.render(() if self.peers is None else await self.peers.metric_values())

    def metric_values(self) -> list[float]:
        """Return this process's part of the metrics (`EngineMetrics.values`)."""
        return [] if self._metrics is None else self._metrics.values()

    def sleep_operation(self, operation: Literal["sleep", "wake"]) -> AbstractContextManager[None]:
        """Measure a block that puts the engine to sleep or wakes it."""
        return nullcontext() if self._metrics is None else self._metrics.sleep_operation(operation)

    def load_headers(self, form: str | None) -> dict[str, str]:
        """Return the headers with the load, in the form that a request asks for."""
        return {} if self._load_report is None else self._load_report.headers(form)

    @property
    def telemetry(self) -> TelemetryHub:
        if self._telemetry is None:
            raise Unavailable(f"the model is loading ({self.phase})", retry_after_s=1.0)
        if not self._telemetry.has_room:
            raise TooManyRequests("too many telemetry readers", retry_after_s=5.0)
        return self._telemetry

    @property
    def num_live(self) -> int:
        """Choices that have not ended; requests, if there are more, whose choices may not have begun."""
        return max(self._accepted.count, self.server_load)

    @property
    def server_load(self) -> int:
        """Choices that have not ended, of all API processes."""
        if self.llm is None:
            return 0
        return self.llm.num_live if self.peers is None else self.llm.queue_limits.num_reqs

    def accepted(self) -> AbstractContextManager[None]:
        """Let `drain` wait for a request that the core may not have yet: its prompts are rendered first, and a beam
        search pauses between two tokens."""
        return self._accepted

    async def drain(self) -> None:
        """Reject new requests, and return when the accepted ones are done, of all API processes."""
        self.is_draining = True
        self._started.set()
        self.phase = "draining"
        if self._telemetry is not None:
            self._telemetry.drain()
        if self.peers is not None:
            await self.peers.drain()
        await asyncio.sleep(0)  # those that were not rejected are counted in this turn of the event loop
        await self._accepted.none_left.wait()
        if self.llm is not None:
            await self.llm.drain()

    async def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
        await self.responses.close()
        if self._serving is not None:
            self._serving.close()
        if self.llm is not None:
            await self.llm.close()
