"""Why requests wait, and why they are rejected, in the metrics."""

from __future__ import annotations

import pytest

from argosy_engine import LLM
from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_engine.errors import EngineBusy
from argosy_engine.frontend.admission import QueueLimits
from argosy_engine.messages import EngineCoreOutputs, SchedulerStats


@pytest.fixture(scope="module")
def metrics() -> EngineMetrics:
    llm = LLM("builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=300)
    try:
        return EngineMetrics(llm.config)
    finally:
        llm.close()


def value(metrics: EngineMetrics, name: str, reason: str) -> float | None:
    metrics.render()
    labels = {"model_name": "tiny", "engine": "0", "reason": reason}
    (model,) = {
        sample.labels["model_name"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }
    return metrics.registry.get_sample_value(name, {**labels, "model_name": model})


def test_waiting_requests_are_counted_by_reason(metrics: EngineMetrics) -> None:
    metrics.on_core_outputs(EngineCoreOutputs(stats=SchedulerStats(num_waiting=5, num_deferred=2)))
    name = "vllm:num_requests_waiting_by_reason"
    assert (value(metrics, name, "capacity"), value(metrics, name, "deferred")) == (3, 2)


def test_rejections_are_counted_by_the_limit(metrics: EngineMetrics) -> None:
    limits = QueueLimits(2, 10, on_rejected=lambda limit, rank: metrics.on_rejected(limit, rank or 0))
    limits.enter("a", 8)
    with pytest.raises(EngineBusy):
        limits.check(1, 5)
    limits.check(1, 2)
    for _ in range(2):
        with pytest.raises(EngineBusy):
            limits.check(2, 1)
    name = "vllm:admission_rejections_total"
    assert value(metrics, name, "max_num_queued_tokens") == 1
    assert value(metrics, name, "max_num_queued_reqs") == 2


def test_tokens_of_preempted_requests_that_are_computed_again_are_counted(metrics: EngineMetrics) -> None:
    for count in (7, 0, 2):
        metrics.on_core_outputs(EngineCoreOutputs(stats=SchedulerStats(num_recomputed_tokens=count)))
    assert "argosy_engine_recomputed_tokens_total{" in metrics.render().decode()
    (sample,) = (
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "argosy_engine_recomputed_tokens_total"
    )
    assert sample.value == 9
