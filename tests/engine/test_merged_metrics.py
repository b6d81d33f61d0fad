"""The metrics of several API processes as those of one."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from argosy_engine import LLM
from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_engine.frontend.observer import RequestTimings
from argosy_engine.messages import EngineCoreOutputs, SchedulerStats
from argosy_engine.resolved_config import ResolvedConfig

E2E = "vllm:e2e_request_latency_seconds"
MEASURED = {f"{E2E}_sum", f"{E2E}_bucket"}
"""By the clock, and so different in two runs."""


@pytest.fixture(scope="module")
def config() -> ResolvedConfig:
    with LLM("builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=16) as llm:
        return llm.config


def shown(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *map(str, sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created") and sample.name not in MEASURED
    }


def serve(metrics: EngineMetrics, num_requests: int, **stats: Any) -> None:
    for _ in range(num_requests):
        timings = RequestTimings(max_tokens=8)
        metrics.on_tokens(timings, 2, timings.arrived + 0.05, True)
        timings.first_token = timings.last_token = timings.arrived + 0.05
        metrics.on_finished(timings, 5, 2, "length")
    metrics.on_core_outputs(EngineCoreOutputs(stats=SchedulerStats(**stats)))


def test_counters_and_histograms_add_up_and_gauges_are_the_first_ones(config: ResolvedConfig) -> None:
    first, second, third, together = (EngineMetrics(config) for _ in range(4))
    serve(first, 3, num_running=2, num_waiting=1, prefix_cache_queries=64, iteration_tokens=7)
    serve(second, 4, num_running=2, num_waiting=9)
    serve(third, 5)
    serve(together, 12, num_running=2, num_waiting=1, prefix_cache_queries=64, iteration_tokens=7)
    merged, expected = shown(first.render([second.values(), third.values()])), shown(together.render())
    assert merged.keys() == expected.keys()
    assert merged == pytest.approx(expected, rel=1e-3)
    assert shown(first.render()) != merged


def test_a_process_that_has_told_nothing_yet_counts_nothing(config: ResolvedConfig) -> None:
    metrics = EngineMetrics(config)
    serve(metrics, 2)
    assert shown(metrics.render([[]])) == shown(metrics.render())
