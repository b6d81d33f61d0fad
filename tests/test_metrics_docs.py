"""docs/reference/metrics.md lists every metric of router, engine, operator and `argosy batch` by its name, kind and
labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, ProcessCollector

from argosy_batch.app import BatchMetrics
from argosy_engine import LLM
from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_router.metric_series import PREFIX
from monitoring.promql import Registry

TEXT = (Path(__file__).parents[1] / "docs" / "reference" / "metrics.md").read_text()
ROW = re.compile(r"^\| `([\w:]+)` \| (counter|gauge|histogram) \|", re.MULTILINE)
_SUFFIXES = {"counter": "_total", "info": "_info"}


def documented() -> dict[str, str]:
    """Name -> kind, of all tables together."""
    rows = ROW.findall(TEXT)
    assert len(rows) == len(dict(rows)), "a metric is listed twice"
    return dict(rows)


def shown(registry: CollectorRegistry) -> dict[str, str]:
    return {name(metric): metric.type.replace("info", "gauge") for metric in registry.collect()}


def name(metric: Metric) -> str:
    return metric.name + _SUFFIXES.get(metric.type, "")


def with_prefix(*prefixes: str) -> dict[str, str]:
    return {name: kind for name, kind in documented().items() if name.startswith(prefixes)}


def test_every_metric_of_the_router() -> None:
    listed = [name.removeprefix(PREFIX).removesuffix("_total") for name in with_prefix(PREFIX)]
    assert sorted(listed) == sorted(Registry.of_router().names)


def test_every_metric_of_the_router_s_process() -> None:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    assert with_prefix("process_") == shown(registry)


def test_every_metric_of_the_operator() -> None:
    assert with_prefix("argosy_operator_") == shown(OperatorMetrics().registry)


def test_every_metric_of_argosy_batch() -> None:
    assert with_prefix("argosy_batch_") == shown(BatchMetrics().registry)


@pytest.fixture(scope="module")
def engine_metrics() -> EngineMetrics:
    llm = LLM("builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=300)
    try:
        return EngineMetrics(llm.config)
    finally:
        llm.close()


def test_every_metric_of_the_engine(engine_metrics: EngineMetrics) -> None:
    assert with_prefix("vllm:", "argosy_engine_") == shown(engine_metrics.registry)
