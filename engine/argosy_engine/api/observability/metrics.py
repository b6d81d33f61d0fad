"""EngineMetrics: Prometheus metrics with vLLM's names, labels and buckets, so that its dashboards work unchanged.

EngineMetrics observes the outputs of the cores. Names are those of vLLM 0.32's /metrics; the label `engine` is the
data-parallel rank. Each of several API processes has its own, of the requests that it serves; the first one's /metrics
adds them up, whichever process is asked.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client import Info as InfoMetric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from argosy_engine.core.proc.media_channel import MediaSender
from argosy_engine.frontend.media.processor import MediaProcessor
from argosy_engine.frontend.observer import Observer, RequestTimings, SkippingApi
from argosy_engine.messages import EngineCoreOutputs
from argosy_engine.resolved_config import ResolvedConfig
from argosy_protocol.skipped_content import OTHER, SKIPPED_KINDS, TOOL_KINDS, Skipped


class LoopHistogram:
    """A series of a `LoopHistogramFamily`: a histogram for what is observed on the event loop, with every token, step
    and request.

    prometheus_client takes a lock for each of the counters that an observation changes, and looks for the bucket from
    the first one on. This one is changed on the event loop alone, where it costs a tenth.

    Args:
        buckets: upper bounds in ascending order, without infinity.
    """

    __slots__ = ("_buckets", "counts", "created", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = tuple(buckets)
        self.counts = [0] * (len(self._buckets) + 1)
        """Observations in each bucket; the last one is those beyond all bounds."""
        self.total = 0.0
        """Sum of all observations."""
        self.created = time.time()

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._buckets, value)] += 1
        self.total += value


class LoopHistogramFamily(Collector):
    """
    Args:
        registry: exposes the family.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label_names: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._label_names = tuple(label_names)
        self._buckets = tuple(buckets)
        self._series: dict[tuple[str, ...], LoopHistogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> LoopHistogram:
        """Return the series with these labels, which is exposed from now on."""
        return self._series.setdefault(values, LoopHistogram(self._buckets))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        bounds = [*(floatToGoString(bound) for bound in self._buckets), "+Inf"]
        for values, series in self._series.items():
            counts = list(zip(bounds, accumulate(series.counts), strict=True))
            family.add_metric(values, counts, series.total)
            labels = dict(zip(self._label_names, values, strict=True))
            family.add_sample(f"{self._name}_created", labels, series.created)
        yield family


_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_BLOCK_LIVES = tuple(m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5))
_ITERATION = tuple(float(1 << power) for power in range(15))
_Metric = TypeVar("_Metric", Gauge, Counter)
_LABELS = ("model_name", "engine")
_CACHE_LABELS = (
    "block_size", "num_gpu_blocks", "cache_dtype", "kv_cache_size_tokens", "kv_cache_max_concurrency",
)  # fmt: skip
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names of the levels 0, 1 and 2."""
_WAITING_REASONS = ("capacity", "deferred")
_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
_SOURCES = ("local_compute", "local_cache_hit")
_TIERS = ("device",)
"""Of vLLM's tiers of KV caches the only one there is."""
_SLEEP_OPERATIONS = ("sleep", "wake")
_SLEEP_TIMES = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOOL_APIS = ("chat_completions", "responses", "other")
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_CUT_SHORT = frozenset({"abort", "error"})
"""Finish reasons of requests that count as finished, but not in the histograms of complete requests."""


class _Sums(Collector):
    """Adds counters and histograms of other API processes to those of a registry.

    Args:
        others: `EngineMetrics.values` of each.
    """

    def __init__(self, registry: CollectorRegistry, others: Sequence[Sequence[float]]) -> None:
        self._registry = registry
        self._others = others

    def collect(self) -> Iterator[Metric]:
        added = zip(*self._others, strict=True)
        for family in self._registry.collect():
            if self._others:
                family.samples = [
                    sample._replace(value=sample.value + sum(next(added)))
                    if _is_added(family, sample)
                    else sample
                    for sample in family.samples
                ]
            yield family


def _is_added(family: Metric, sample: Sample) -> bool:
    """Whether the value of a sample is the sum over all API processes."""
    return family.type in ("counter", "histogram") and not sample.name.endswith("_created")


def _token_buckets(limit: int) -> tuple[float, ...]:
    """Return the buckets 1, 2, 5, 10, 20, 50 ... up to the model's length."""
    return tuple(float(m * 10**e) for e in range(8) for m in (1, 2, 5) if m * 10**e <= limit)


class EngineMetrics(Observer):
    """One registry per engine; `render` is the body of /metrics. Attributes are lists: a series for each rank.

    Args:
        media: of this API process, whose cache is counted.
    """

    def __init__(self, config: ResolvedConfig, media: MediaProcessor | None = None) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ranks = [(config.model_name, str(rank)) for rank in range(config.data_parallel_size)]

        def gauge(name: str, text: str) -> list[Gauge]:
            family = Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry)
            return [family.labels(*values) for values in ranks]

        def counter(name: str, text: str, prefix: str = "vllm:") -> list[Counter]:
            family = Counter(f"{prefix}{name}", text, _LABELS, registry=self.registry)
            return [family.labels(*values) for values in ranks]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> list[LoopHistogram]:
            family = LoopHistogramFamily(f"vllm:{name}", text, _LABELS, buckets, self.registry)
            return [family.labels(*values) for values in ranks]

        def labelled(
            kind: type[_Metric], name: str, text: str, label: str, values: tuple[str, ...]
        ) -> list[dict[str, _Metric]]:
            family = kind(f"vllm:{name}", text, (*_LABELS, label), registry=self.registry)
            return [{value: family.labels(*rank, value) for value in values} for rank in ranks]

        self._running = gauge("num_requests_running", "Requests in the model's execution batches.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._waiting_by_reason = labelled(
            Gauge,
            "num_requests_waiting_by_reason",
            "Requests waiting for room (capacity), or for a grammar (deferred).",
            "reason",
            _WAITING_REASONS,
        )
        self._kv_usage = gauge("kv_cache_usage_perc", "KV cache usage; 1 is full.")
        self._levels: list[tuple[int, int, int, float]] = [(0, 0, 0, 0.0)] * len(self._kv_usage)
        """Of each core: running, waiting and deferred requests, and the KV cache's usage."""
        self._sleep = labelled(
            Gauge,
            "engine_sleep_state",
            "1 for the state that the engine is in.",
            "sleep_state",
            _SLEEP_STATES,
        )
        self.set_sleep_level(0)
        sleep_times = Histogram(
            "vllm:sleep_mode_operation_duration_seconds",
            "Time to put the engine to sleep, and to wake it.",
            ("operation",),
            buckets=_SLEEP_TIMES,
            registry=self.registry,
        )
        sleeping = Gauge(
            "vllm:sleep_mode_operations_in_flight",
            "Calls that put the engine to sleep or wake it and have not ended.",
            ("operation",),
            registry=self.registry,
        )
        self._sleep_times = {each: sleep_times.labels(each) for each in _SLEEP_OPERATIONS}
        self._sleep_calls = {each: sleeping.labels(each) for each in _SLEEP_OPERATIONS}
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._media = media
        self._num_media = (0, 0)
        self._media_queries = counter(
            "mm_cache_queries", "Images looked up in the cache of processed images."
        )
        self._media_hits = counter("mm_cache_hits", "Images found in the cache of processed images.")
        self._encoder_queries = counter(
            "encoder_cache_queries", "Images whose encoder outputs a request began to need.", "argosy_engine_"
        )
        self._encoder_hits = counter(
            "encoder_cache_hits",
            "Images that were not encoded, since their outputs were kept.",
            "argosy_engine_",
        )
        self._preemptions = counter("num_preemptions", "Preemptions.")
        self._recomputed = counter(
            "recomputed_tokens",
            "Tokens of preempted requests that were computed again, because the prefix cache no longer had them.",
            "argosy_engine_",
        )
        self._stalled = counter(
            "stalled_requests",
            "Requests failed by the watchdog after --request-stall-timeout without progress.",
            "argosy_engine_",
        )
        slow_clients = Counter(
            "argosy_engine_slow_clients",
            "Clients disconnected because they did not read their responses (--timeout-write).",
            ("model_name",),
            registry=self.registry,
        )
        self._slow_clients = slow_clients.labels(config.model_name)
        framed = Counter(
            "argosy_engine_framed_images",
            "Images whose files could not be passed to the core, and were copied (--mm-tensor-ipc torch_shm).",
            ("model_name",),
            registry=self.registry,
        )
        self._framed_images, self._num_framed = framed.labels(config.model_name), MediaSender.num_framed
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished prefills.")
        self._prompt_cached = counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._generated = counter("generation_tokens", "Generated tokens.")
        self._num_generated = [0] * len(ranks)
        """Tokens that are to be added to `_generated`."""
        self._num_prompt = [0] * len(ranks)
        """Prompt tokens that are to be added to `_prompt` and `_sources`."""
        self._num_cached = [0] * len(ranks)
        """Cached ones among them."""
        self._num_looked_up = [0] * len(ranks)
        """Prompt tokens that are to be added to `_queries`."""
        self._num_hit = [0] * len(ranks)
        """Prompt tokens that are to be added to `_hits`."""
        self._num_success: list[dict[str, int]] = [{} for _ in ranks]
        """Requests that are to be added to `_success`, by reason."""
        self._sources = labelled(
            Counter, "prompt_tokens_by_source", "Prompt tokens by where they came from.", "source", _SOURCES
        )
        self._hits_by_tier = labelled(
            Counter,
            "prompt_tokens_cached_by_source",
            "Prompt tokens found in the prefix cache, by where the cache is.",
            "source",
            _TIERS,
        )
        self._success = labelled(
            Counter, "request_success", "Finished requests.", "finished_reason", _FINISH_REASONS
        )
        self._rejections = labelled(
            Counter, "admission_rejections", "Calls that a full queue rejected, by limit.", "reason", _LIMITS
        )
        parsed = Counter(
            "vllm:tool_call_parser_invocations",
            "Choices of requests with tools, by whether they call one.",
            ("model_name", "mode", "outcome", "request_type"),
            registry=self.registry,
        )
        self._parsed = {
            (has_calls, is_stream, api): parsed.labels(config.model_name, mode, outcome, api)
            for has_calls, outcome in ((True, "tool_call"), (False, "no_tool_call"))
            for is_stream, mode in ((True, "streaming"), (False, "non_streaming"))
            for api in _TOOL_APIS
        }
        skipped = Counter(
            "argosy_engine_skipped_content",
            "Blocks of clients' history that no model here reads and that were left out, or replaced by a note.",
            ("model_name", "api", "kind"),
            registry=self.registry,
        )
        self._skipped = {
            (api, kind): skipped.labels(config.model_name, api, kind)
            for api, kinds in SKIPPED_KINDS.items()
            for kind in sorted((*kinds, OTHER))
        }
        dropped = Counter(
            "argosy_engine_dropped_tools",
            "Tools of requests that only servers of OpenAI or Anthropic run, of which the model was not told.",
            ("model_name", "kind"),
            registry=self.registry,
        )
        self._dropped = {
            kind: dropped.labels(config.model_name, kind) for kind in sorted((*TOOL_KINDS, OTHER))
        }
        self._model_name = config.model_name
        self._relaxed = Counter(
            "argosy_engine_relaxed_tool_schemas",
            "Requests with required tool calls whose schemas have a keyword that is not enforced, by keyword.",
            ("model_name", "keyword"),
            registry=self.registry,
        )
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Time between output tokens.", _ITL)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token of a request.", _ITL
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Whole request.", _LATENCY)
        self._queue_time = histogram("request_queue_time_seconds", "Time in the waiting queue.", _LATENCY)
        self._prefill_time = histogram("request_prefill_time_seconds", "Time in prefill.", _LATENCY)
        self._decode_time = histogram("request_decode_time_seconds", "Time in decode.", _LATENCY)
        self._inference_time = histogram(
            "request_inference_time_seconds", "Time in prefill and decode.", _LATENCY
        )
        tokens = _token_buckets(config.max_model_len)
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens per request.", tokens)
        self._output_sizes = histogram("request_generation_tokens", "Generated tokens per request.", tokens)
        self._computed_sizes = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens per request that were computed, not cached.",
            tokens,
        )
        self._longest = histogram(
            "request_max_num_generation_tokens", "Generated tokens of a prompt's longest choice.", tokens
        )
        self._params_n = histogram("request_params_n", "Choices (n) per prompt.", _CHOICES)
        self._params_max_tokens = histogram(
            "request_params_max_tokens", "Most tokens that a request may generate.", tokens
        )
        self._request_preemptions = histogram(
            "request_num_preemptions", "Preemptions per request.", _PREEMPTIONS
        )
        self._iteration = histogram("iteration_tokens_total", "Tokens per step.", _ITERATION)
        self._block_lives = (
            [
                histogram("kv_block_lifetime_seconds", "Allocation to eviction of a KV block.", _BLOCK_LIVES),
                histogram("kv_block_idle_before_evict_seconds", "Last use to eviction.", _BLOCK_LIVES),
                histogram("kv_block_reuse_gap_seconds", "Between two uses of a KV block.", _BLOCK_LIVES),
            ]
            if config.kv_cache_metrics
            else []
        )
        # vLLM exposes this as a gauge that is always 1, not as an Info metric.
        cache_config = Gauge(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            (*_LABELS, *_CACHE_LABELS),
            registry=self.registry,
        )
        for values, memory in zip(ranks, config.memory_of_ranks, strict=True):
            num_tokens = memory.num_blocks * config.block_size
            concurrency = round(num_tokens / config.max_model_len, 2)
            cache_config.labels(
                *values, config.block_size, memory.num_blocks, config.dtype, num_tokens, concurrency
            ).set(1)
        InfoMetric("argosy_engine", "This engine.", registry=self.registry).info(
            {"device": config.device, "dtype": config.dtype, "architecture": config.architecture}
        )

    def set_sleep_level(self, level: int) -> None:
        """Set the sleep level; 0 is awake (`AsyncLLM.sleep`)."""
        for gauges in self._sleep:
            for index, state in enumerate(_SLEEP_STATES):
                gauges[state].set(index == level)

    @contextmanager
    def sleep_operation(self, operation: Literal["sleep", "wake"]) -> Iterator[None]:
        """Measure the block, which puts the engine to sleep or wakes it."""
        with self._sleep_calls[operation].track_inprogress(), self._sleep_times[operation].time():
            yield

    def render(self, others: Sequence[Sequence[float]] = ()) -> bytes:
        """Return the text of all metrics.

        Args:
            others: `values` of other API processes. Their counters and histograms are added; gauges are the cores',
                which this process knows.
        """
        self._add_counted()
        return generate_latest(
            _Sums(self.registry, [values for values in others if values]) if others else self.registry
        )

    def values(self) -> list[float]:
        """Return the values of all counters and histograms, in an order that is the same in all API processes."""
        self._add_counted()
        return [
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if _is_added(family, sample)
        ]

    def _add_counted(self) -> None:
        """Move what was counted and noted without locks into the counters and gauges."""
        self._framed_images.inc(MediaSender.num_framed - self._num_framed)
        self._num_framed = MediaSender.num_framed
        if self._media is not None:  # the cache is this process's, of all cores
            found = self._media.num_queries, self._media.num_hits
            for family, new, old in zip(
                (self._media_queries, self._media_hits), found, self._num_media, strict=True
            ):
                family[0].inc(new - old)
            self._num_media = found
        for rank, (running, waiting, deferred, kv_usage) in enumerate(self._levels):
            self._running[rank].set(running)
            self._waiting[rank].set(waiting)
            self._waiting_by_reason[rank]["capacity"].set(waiting - deferred)
            self._waiting_by_reason[rank]["deferred"].set(deferred)
            self._kv_usage[rank].set(kv_usage)
            self._queries[rank].inc(self._num_looked_up[rank])
            self._hits[rank].inc(self._num_hit[rank])
            self._hits_by_tier[rank]["device"].inc(self._num_hit[rank])
            self._num_looked_up[rank] = self._num_hit[rank] = 0
        for rank, counter in enumerate(self._generated):
            counter.inc(self._num_generated[rank])
            self._prompt[rank].inc(self._num_prompt[rank])
            self._prompt_cached[rank].inc(self._num_cached[rank])
            self._sources[rank]["local_cache_hit"].inc(self._num_cached[rank])
            self._sources[rank]["local_compute"].inc(self._num_prompt[rank] - self._num_cached[rank])
            self._num_generated[rank] = self._num_prompt[rank] = self._num_cached[rank] = 0
            for reason, count in self._num_success[rank].items():
                self._success[rank][reason].inc(count)
            self._num_success[rank].clear()

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        stats, rank = outputs.stats, outputs.engine_index
        if stats is None:
            return
        self._levels[rank] = stats.num_running, stats.num_waiting, stats.num_deferred, stats.kv_cache_usage
        self._num_looked_up[rank] += stats.prefix_cache_queries
        self._num_hit[rank] += stats.prefix_cache_hits
        if stats.encoder_cache_queries:
            self._encoder_queries[rank].inc(stats.encoder_cache_queries)
            self._encoder_hits[rank].inc(stats.encoder_cache_hits)
        if stats.num_preemptions:
            self._preemptions[rank].inc(stats.num_preemptions)
        if stats.num_recomputed_tokens:
            self._recomputed[rank].inc(stats.num_recomputed_tokens)
        if stats.num_stalled:
            self._stalled[rank].inc(stats.num_stalled)
        if stats.iteration_tokens:
            self._iteration[rank].observe(stats.iteration_tokens)
        if stats.evicted_blocks and self._block_lives:
            lifetime, idle, reuse_gap = (family[rank] for family in self._block_lives)
            for life in stats.evicted_blocks:
                lifetime.observe(life.lifetime_s)
                idle.observe(life.idle_s)
                for gap in life.reuse_gaps_s:
                    reuse_gap.observe(gap)

    def on_slow_client(self) -> None:
        """Count a client that was disconnected because it did not read its response."""
        self._slow_clients.inc()

    def on_lost(self, timings: RequestTimings) -> None:
        self._stalled[timings.engine_index].inc()

    def on_rejected(self, reason: str, rank: int) -> None:
        self._rejections[rank][reason].inc()

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None:
        rank = timings.engine_index
        self._num_generated[rank] += count
        if is_first:
            self._ttft[rank].observe(now - timings.arrived)
            self._queue_time[rank].observe(timings.queued_s)
            self._prefill_time[rank].observe(timings.prefill_s)
        else:
            self._itl[rank].observe(now - timings.last_token)

    def on_tools_parsed(self, has_calls: bool, is_stream: bool, api: str) -> None:
        self._parsed[has_calls, is_stream, api].inc()

    def on_relaxed(self, keywords: Sequence[str]) -> None:
        for keyword in keywords:
            self._relaxed.labels(self._model_name, keyword).inc()

    def on_skipped(self, api: SkippingApi, skipped: Skipped) -> None:
        for kind, count in skipped.content.items():
            self._skipped[api, kind].inc(count)
        for kind, count in skipped.tools.items():
            self._dropped[kind].inc(count)

    def on_finished(self, timings: RequestTimings, num_prompt: int, num_output: int, reason: str) -> None:
        rank = timings.engine_index
        ended = self._num_success[rank]
        ended[reason] = ended.get(reason, 0) + 1
        if timings.first_token:
            self._num_prompt[rank] += num_prompt
            self._num_cached[rank] += timings.num_cached
        is_last = timings.choices.end(num_output)
        if reason in _CUT_SHORT:
            return
        if is_last:
            self._params_n[rank].observe(timings.choices.num_choices)
            self._longest[rank].observe(timings.choices.longest)
        if timings.max_tokens is not None:
            self._params_max_tokens[rank].observe(timings.max_tokens)
        self._request_preemptions[rank].observe(timings.num_preemptions)
        self._computed_sizes[rank].observe(num_prompt - timings.num_cached)
        self._e2e[rank].observe(time.monotonic() - timings.arrived)
        decode_s = timings.last_token - timings.first_token
        self._decode_time[rank].observe(decode_s)
        self._inference_time[rank].observe(timings.prefill_s + decode_s)
        if num_output > 1:
            self._tpot[rank].observe(decode_s / (num_output - 1))
        self._prompt_sizes[rank].observe(num_prompt)
        self._output_sizes[rank].observe(num_output)
