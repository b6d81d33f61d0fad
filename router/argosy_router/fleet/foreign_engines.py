"""Polling of foreign replicas, such as stock vLLM and SGLang, which have no telemetry stream.

Owns: polling `/health` and `/metrics` of one replica, and the names of these engines' metrics (vLLM V0 and V1, SGLang).
Must not know: telemetry, policies, other replicas.
Invariants: only `/health` decides whether the replica is used; if its load figures are not readable, its load is what
this router sent it; the prefixes it is believed to hold are forgotten when it restarts. Samples of one name are summed
over their labels, so that an engine with data parallelism counts as the sum of its ranks; ratios (KV usage) are
averaged.
"""

# Not compiled: runs for each poll of an engine, not for each request.

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from argosy_router.fleet.replica import MAX_REQUESTS, MAX_TOKENS, Replica, bounded_count
from argosy_router.http.upstream import ConnectFailed, Fetcher, FirstByteTimeout, IdleTimeout, UpstreamError

_MAX_SAMPLE = 1e15
"""A larger sample is none: sums of samples stay exact, and finite."""

PRIOR_PROMPT_TOKENS = 1024.0
"""Assumed length of a waiting prompt while the engine has not counted any (SMG assumes the same)."""

Names = tuple[bytes, ...]


class _MetricNames(NamedTuple):
    """The metric names of one make of engine; of several alternatives, the first one present counts."""

    running: Names
    waiting: Names
    kv_usage: Names
    prompts: Names
    """Counts prompts."""
    prompt_tokens: Names
    """Counts the tokens of these prompts."""
    looked_up: Names
    """Counts prompt tokens looked up in the prefix cache."""
    found: Names
    """Counts those of them that were found."""


_ENGINES = (
    _MetricNames(
        running=(b"vllm:num_requests_running",),
        waiting=(b"vllm:num_requests_waiting",),
        kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        prompts=(b"vllm:request_prompt_tokens_count",),
        prompt_tokens=(b"vllm:request_prompt_tokens_sum",),
        looked_up=(b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
        found=(b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"),
    ),
    _MetricNames(
        running=(b"sglang:num_running_reqs",),
        waiting=(b"sglang:num_queue_reqs",),
        kv_usage=(b"sglang:token_usage",),
        prompts=(b"sglang:num_requests_total",),
        prompt_tokens=(b"sglang:prompt_tokens_total",),
        looked_up=(b"sglang:prompt_tokens_total",),
        found=(b"sglang:cached_tokens_total",),
    ),
)
_REST = re.compile(rb'(?:\{(?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+\})? (\S+)')
"""The rest of a sample's line after its name: optional labels, and the value."""
_MAX_SAMPLED_BYTES = 256 * 1024
"""Of the lines of one name that are read: whatever a replica sends, the router serves others meanwhile. A thousand
ranks take a third of it."""
_LINE_BYTES = 64
"""Counted for a line beside its own."""


class EngineLoad(NamedTuple):
    """Load of one engine, summed over its ranks."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0..1."""
    queued_tokens: int
    """Estimate: waiting requests, times the mean prompt length so far, times the share of tokens not cached."""
    looked_up_tokens: float
    """A counter, which shrinks only when the engine restarts."""


def parse_load(exposition: bytes) -> EngineLoad | None:
    """Read the load from a Prometheus text exposition; None if no known engine wrote it."""
    lines = b"\n" + exposition
    for engine in _ENGINES:
        if any(_values(lines, name) for name in engine.running):
            return _load(engine, lines)
    return None


def _values(lines: bytes, name: bytes) -> list[float]:
    """Return the samples of one name. Searching for the few names needed takes a fifth of the time
    that parsing all lines takes."""
    values = []
    start = b"\n" + name
    at = lines.find(start)
    left = _MAX_SAMPLED_BYTES
    while at >= 0:
        end = at + len(start)
        line_end = lines.find(b"\n", end)
        if line_end < 0:
            line_end = len(lines)
        left -= line_end - end + _LINE_BYTES
        if left < 0:
            break
        sample = _REST.match(lines, end, line_end)
        if sample is not None:
            try:
                value = float(sample[1])
            except ValueError:
                value = -1.0
            if isfinite(value) and 0.0 <= value <= _MAX_SAMPLE:
                values.append(value)
        at = lines.find(start, line_end)
    return values


def _load(engine: _MetricNames, lines: bytes) -> EngineLoad:
    def values(names: Names) -> list[float]:
        return next(filter(None, (_values(lines, name) for name in names)), [])

    waiting = sum(values(engine.waiting))
    usage = values(engine.kv_usage)
    prompts, prompt_tokens = sum(values(engine.prompts)), sum(values(engine.prompt_tokens))
    looked_up, found = sum(values(engine.looked_up)), sum(values(engine.found))
    length = prompt_tokens / prompts if prompts else PRIOR_PROMPT_TOKENS
    uncached = 1.0 - min(1.0, found / looked_up) if looked_up else 1.0
    return EngineLoad(
        running=bounded_count(int(sum(values(engine.running))), MAX_REQUESTS),
        waiting=bounded_count(int(waiting), MAX_REQUESTS),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else 0.0,
        queued_tokens=bounded_count(int(min(waiting * length * uncached, _MAX_SAMPLE)), MAX_TOKENS),
        looked_up_tokens=looked_up,
    )


log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""Between polls the router adds its own requests to the figures; other routers' requests show with this delay."""
TIMEOUT_S = 5.0
MISSES = 2
"""Unanswered polls of `/health` in a row before the replica is no longer used: a busy replica may miss one."""
MAX_METRICS_BYTES = 4 * 1024 * 1024
"""vLLM's exposition is some 100 KB per rank."""


class ForeignPoller:
    """Polls one foreign replica, and updates its health and load."""

    def __init__(
        self,
        replica: Replica,
        on_change: Callable[[], None],
        on_silent: Callable[[bool], None],
        rng: random.Random,
    ) -> None:
        """`on_silent(False)` is called while polls are not answered, and moves requests whose response has not begun.
        Streams keep their own deadline, because no other replica can continue them."""
        self._replica = replica
        self._fetcher = Fetcher(replica.pool)
        self._on_change = on_change
        self._on_silent = on_silent
        self._rng = rng
        self._misses = 0
        self._has_load = True
        """Whether the last poll of `/metrics` had load figures; initially true, so that a first failure is logged."""
        self._looked_up_tokens = 0.0

    async def poll(self, rounds: int) -> None:
        """Poll `rounds` times, with pauses, on one connection while it lasts."""
        try:
            for _ in range(rounds):
                self._fetcher.key = self._replica.key.current
                await self._poll_health()
                if self._replica.health.is_answering:
                    await self._poll_load()
                await asyncio.sleep(POLL_INTERVAL_S * self._rng.uniform(0.8, 1.0))
        finally:
            self._fetcher.close()

    async def _poll_health(self) -> None:
        replica = self._replica
        is_silent = False
        try:
            response = await self._fetcher.get("/health", TIMEOUT_S)
        except UpstreamError as error:
            is_silent = _is_silence(error)
            self._misses += is_silent
            is_answering = is_silent and replica.health.is_answering and self._misses < MISSES
        else:
            self._misses = 0
            is_answering = response.status == 200
        is_first = replica.note_tried()
        if replica.health.polled(is_answering=is_answering) or is_first:
            self._on_change()
        if is_silent and not is_answering:
            self._on_silent(False)

    async def _poll_load(self) -> None:
        replica = self._replica
        try:
            response = await self._fetcher.get("/metrics", TIMEOUT_S, MAX_METRICS_BYTES)
            load = parse_load(response.body) if response.status == 200 else None
        except UpstreamError:
            load = None
        if load is None:
            if self._has_load:
                log.info("replica %s: no load figures at /metrics, going by what it is sent", replica.name)
                replica.load.forget()
            self._has_load = False
            return
        self._has_load = True
        if load.looked_up_tokens < self._looked_up_tokens:
            log.info("replica %s has restarted", replica.name)
            replica.prefixes.clear()
        self._looked_up_tokens = load.looked_up_tokens
        replica.load.report(
            requests=load.running + load.waiting, tokens=load.queued_tokens, kv_usage=load.kv_usage
        )


def _is_silence(error: UpstreamError) -> bool:
    """Return whether the replica did not react at all, like a stopped process or an unreachable host."""
    if isinstance(error, ConnectFailed):
        return not error.refused
    return isinstance(error, (FirstByteTimeout, IdleTimeout))
