"""The page of metrics, from the registries of router, engine, operator and `argosy batch`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from argosy_batch.app import BatchMetrics
from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_engine.resolved_config import MemoryBudget, ResolvedConfig
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_router.metric_series import PREFIX, Counter, Histogram, Series
from argosy_router.server import Router
from docs_reference.markdown import code, page, section, table
from monitoring.promql import PRODUCTION

_HEAD = ("metric", "kind", "labels", "meaning")
_INTRODUCTION = """\
Every series of the four programs. [Observability](../observability.md) explains where they are scraped, what the
values of the labels mean, and which dashboards and alerts the chart installs. A counter's name ends in `_total`; a
histogram has the series `_bucket`, `_sum` and `_count`."""
_ROUTER = """\
`/metrics` of the admin port (`--admin-port`, 8081)."""
_PROCESS = "About the router's process, from Linux's `/proc`:"
_ENGINE = """\
`/metrics` of an engine, with the names, labels and buckets of vLLM, so that dashboards and autoscaling recipes for vLLM
work unchanged. Histograms of whole requests leave out those that were aborted or failed."""
_OPERATOR = "`/metrics` of the operator's health port (`--health-port`, 8082)."
_BATCH = "`/metrics` of the port of [`argosy batch`](../batch.md) (`--port`, 8082)."

_BUDGET = MemoryBudget(
    device="cpu",
    total_bytes=1,
    available_bytes=1,
    utilization=1.0,
    weights_bytes=1,
    activation_bytes=1,
    block_bytes=1,
    block_size=16,
    num_blocks=2,
    request_blocks=1,
    max_model_len=16,
    limited_by="memory",
)
_ENGINE_CONFIG = ResolvedConfig(
    model_path="",
    model_name="",
    model_fingerprint="",
    architecture="",
    device="cpu",
    dtype="float32",
    max_model_len=16,
    vocab_size=1,
    embedding_size=1,
    is_matryoshka=False,
    matryoshka_dimensions=(),
    block_size=16,
    num_gpu_blocks=2,
    max_num_seqs=1,
    max_num_batched_tokens=16,
    max_num_queued_reqs=1,
    max_num_queued_tokens=None,
    scheduling_policy="fcfs",
    async_scheduling=False,
    epoch="",
    eos_token_ids=(),
    logits_processors=(),
    max_logprobs=0,
    logprobs_mode="raw_logprobs",
    startup_phases=(),
    memory=_BUDGET,
)
"""Any: names, labels and help of an engine's series do not depend on it."""


def metrics_page() -> str:
    return page(
        "Metrics reference",
        _INTRODUCTION,
        [
            section(
                "Router",
                _ROUTER,
                table(_HEAD, sorted(map(_router_row, router_series()))),
                _PROCESS,
                table(_HEAD, rows_of(process_registry())),
            ),
            section("Engine", _ENGINE, table(_HEAD, rows_of(EngineMetrics(_ENGINE_CONFIG).registry))),
            section("Operator", _OPERATOR, table(_HEAD, described_rows(OperatorMetrics()))),
            section("Files and batches", _BATCH, table(_HEAD, described_rows(BatchMetrics()))),
        ],
    )


def router_series() -> tuple[Series, ...]:
    """All series of a router as production runs it."""

    async def build() -> tuple[Series, ...]:
        return tuple(Router(PRODUCTION).metrics.series)

    return asyncio.run(build())


def _router_row(series: Series) -> tuple[str, ...]:
    if isinstance(series, Histogram):
        kind = "histogram"
    else:
        kind = "counter" if isinstance(series, Counter) else series.kind
    suffix = "_total" if kind == "counter" else ""
    return code(PREFIX + series.name + suffix), kind, ", ".join(series.labels), series.help


def process_registry() -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def rows_of(registry: CollectorRegistry) -> Iterable[tuple[str, ...]]:
    """Rows of a registry whose metrics all have samples."""
    for family in registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        kind = family.type.replace("info", "gauge")  # the text exposition knows no other kind for it
        labels = dict.fromkeys(name for sample in family.samples for name in sample.labels if name != "le")
        yield code(family.name + suffix), kind, ", ".join(labels), family.documentation


def described_rows(metrics: OperatorMetrics | BatchMetrics) -> Iterable[tuple[str, ...]]:
    """Rows of metrics of which some have no samples yet."""
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            suffix = "_total" if family.type == "counter" else ""
            yield code(family.name + suffix), family.type, ", ".join(metric._labelnames), family.documentation
