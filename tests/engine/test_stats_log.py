"""The line of statistics that the server logs."""

from __future__ import annotations

import pytest

from argosy_engine.api.observability.telemetry import INTERVAL_S, StatsLog
from argosy_engine.messages import EngineCoreOutput, EngineCoreOutputs, SchedulerStats


def test_the_stats_line_appears_with_traffic_only(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = StatsLog(clock=lambda: now)
    caplog.set_level("INFO", "argosy.stats")

    def tick(seconds: float, tokens: int = 0, **stats: float) -> None:
        nonlocal now
        now += seconds
        outputs = [EngineCoreOutput("r", [1] * tokens)] if tokens else []
        log.on_core_outputs(EngineCoreOutputs(outputs, SchedulerStats(**stats)))  # type: ignore[arg-type]

    for _ in range(100):
        tick(0.5)
    assert caplog.records == []
    tick(0.5, num_running=1, prefix_cache_queries=100, prefix_cache_hits=50)
    tick(INTERVAL_S, tokens=30, num_tokens_elsewhere=10, num_running=1, num_waiting=2, kv_cache_usage=0.25)
    (record,) = caplog.records
    line = record.getMessage()
    assert f"prompt throughput: {50 / INTERVAL_S:.1f} tokens/s" in line
    assert f"generation throughput: {40 / INTERVAL_S:.1f} tokens/s" in line
    assert "Running: 1 reqs, Waiting: 2 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 50.0%" in line
    for _ in range(100):
        tick(0.5)
    assert len(caplog.records) == 1
