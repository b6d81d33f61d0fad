"""RequestSpans: one OpenTelemetry span per choice that the core computes, with vLLM's name and attributes.

Owns: names of spans and attributes. Must not know: how spans are exported.
Invariant: without `--otlp-traces-endpoint` nothing here is imported; a collector that is slow or gone costs spans, and
never a request.

The parent is the `traceparent` of the client or router. vLLM's names are kept although the semantic conventions for
generative AI have moved on; those that they have besides are added.
"""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from argosy_engine.frontend.observer import Observer, RequestRecord, RequestTimings

SPAN_NAME = "llm_request"
_NS_PER_S = 1_000_000_000


class RequestSpans(Observer):
    """
    Args:
        model: the model's canonical name.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("argosy_engine")
        self._context = TraceContextTextMapPropagator()
        self._model = model

    def on_finished(self, timings: RequestTimings, num_prompt: int, num_output: int, reason: str) -> None:
        record, params = timings.record, timings.params
        now, now_ns = time.monotonic(), time.time_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            self._parent(record),
            SpanKind.SERVER,
            start_time=now_ns - int((now - timings.arrived) * _NS_PER_S),
        )
        if span.is_recording():
            decode_s = timings.last_token - timings.first_token
            values: dict[str, object] = {
                "gen_ai.request.id": None if record is None else record.request_id or None,
                "gen_ai.request.model": None if record is None else record.model or None,
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": (reason,),
                "gen_ai.request.n": timings.choices.num_choices,
                "gen_ai.request.max_tokens": timings.max_tokens,
                "gen_ai.request.temperature": None if params is None else params.temperature,
                "gen_ai.request.top_p": None if params is None else params.top_p,
                "gen_ai.usage.prompt_tokens": num_prompt,
                "gen_ai.usage.completion_tokens": num_output,
                "gen_ai.usage.cache_read.input_tokens": timings.num_cached,
                "gen_ai.latency.e2e": now - timings.arrived,
            }
            if timings.first_token:
                values |= {
                    "gen_ai.latency.time_to_first_token": timings.first_token - timings.arrived,
                    "gen_ai.latency.time_in_queue": timings.queued_s,
                    "gen_ai.latency.time_in_model_prefill": timings.prefill_s,
                    "gen_ai.latency.time_in_model_decode": decode_s,
                    "gen_ai.latency.time_in_model_inference": timings.prefill_s + decode_s,
                }
            for name, value in values.items():
                if isinstance(value, str | int | float | tuple):
                    span.set_attribute(name, value)
            if reason == "error":
                span.set_status(Status(StatusCode.ERROR, "the engine could not compute it"))
        span.end(now_ns)

    def _parent(self, record: RequestRecord | None) -> Context:
        """Return the client's context, which is read once for all choices of a request."""
        if record is None:
            return Context()
        if not isinstance(record.parent, Context):
            record.parent = self._context.extract(record.trace_headers)
        return record.parent

    def close(self) -> None:
        """Export the remaining spans. Blocks for some seconds at most."""
        self._provider.shutdown()
