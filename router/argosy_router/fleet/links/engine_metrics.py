"""Load figures from other engines' `/metrics`: stock vLLM (V0 and V1 names) and SGLang.

Owns: the metric names. Must not know: replicas, connections.
Invariant: samples of one name are summed over their labels, so that an engine with data parallelism counts as the sum
of its ranks; ratios (KV usage) are averaged.
"""

# Not compiled: runs for each poll of an engine, not for each request.

from __future__ import annotations

import re
from math import isfinite
from typing import NamedTuple

from argosy_router.fleet.links.reported_figures import MAX_REQUESTS, MAX_TOKENS, count

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
        running=count(int(sum(values(engine.running))), MAX_REQUESTS),
        waiting=count(int(waiting), MAX_REQUESTS),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else 0.0,
        queued_tokens=count(int(min(waiting * length * uncached, _MAX_SAMPLE)), MAX_TOKENS),
        looked_up_tokens=looked_up,
    )
