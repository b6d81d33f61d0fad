"""Builds a telemetry hub without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from argosy_engine.api.observability.telemetry import TelemetryHub


def make_hub(llm: object = None, num_engines: int = 1) -> TelemetryHub:
    config = SimpleNamespace(
        epoch="e",
        model_name="m",
        model_fingerprint="f",
        block_size=16,
        max_model_len=1,
        max_num_seqs=1,
        scheduling_policy="fcfs",
        data_parallel_size=num_engines,
        memory_of_ranks=[SimpleNamespace(kv_cache_tokens=100)] * num_engines,
    )
    llm = llm or SimpleNamespace(heartbeat_age_s=0.0)
    return TelemetryHub(cast("Any", llm), cast("Any", config))
