"""One OpenTelemetry span per generation request, sent by OTLP over HTTP.

Owns: span and attribute names, trace context of clients and engines. Must not know: when requests begin and end.
Invariant: without an endpoint nothing here is imported or run; a collector that is slow or gone costs spans, never a
request, because the SDK sends spans from a bounded queue in a thread of its own.

The client's `traceparent` is the parent of the router's span, and the engine receives the span's own, so that the three
form one trace. The semantic conventions for generative AI are still in development, so their names are used only here.
"""

# Not compiled: its time goes to OpenTelemetry's SDK.

from __future__ import annotations

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from argosy_protocol.program.otlp_traces import tracer_provider
from argosy_router.http.messages import Headers
from argosy_router.observability.request_log import AccessEntry

_CONTEXT_HEADERS = frozenset((b"traceparent", b"tracestate"))
_ATTRIBUTES = {
    "request": "gen_ai.response.id",
    "status": "http.response.status_code",
    "key": "argosy.key",
    "model": "gen_ai.request.model",
    "replica": "argosy.replica",
    "route": "argosy.route",
    "attempts": "argosy.attempts",
    "migrations": "argosy.migrations",
    "predicted_tokens": "argosy.predicted_cached_tokens",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
"""field of `AccessEntry` -> attribute"""


class Trace:
    """The span of one request that has not ended."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, entry: AccessEntry, policy: str, predicted_ttft_s: float | None) -> None:
        """End the span, with attributes from the request's access entry."""
        span = self._span
        if span.is_recording():
            for field, name in _ATTRIBUTES.items():
                value = getattr(entry, field)
                if value is not None and value != "":
                    span.set_attribute(name, value)
            span.set_attribute("argosy.policy", policy)
            if entry.ttft_ms is not None:
                span.set_attribute("gen_ai.latency.time_to_first_token", entry.ttft_ms / 1000.0)
            if predicted_ttft_s is not None:
                span.set_attribute("argosy.predicted_time_to_first_token", predicted_ttft_s)
            if entry.status >= 500:
                span.set_status(Status(StatusCode.ERROR, f"status {entry.status}"))
        span.end()


class Tracer:
    """Starts spans, and exports them in the background."""

    def __init__(self, endpoint: str, router: str) -> None:
        """`endpoint` is the collector's URL; without a path, `/v1/traces` is added. `router` names this instance."""
        self._provider = tracer_provider(endpoint, "argosy-router", router)
        self._tracer = self._provider.get_tracer("argosy_router")
        self._context = TraceContextTextMapPropagator()

    def begin(self, headers: Headers, name: str) -> tuple[Trace, Headers]:
        """Start a span, as a child of the client's if it sent a valid context.

        Returns:
            The trace, and the headers with the client's context replaced by the span's.
        """
        sent = {key.decode(): value.decode("latin-1") for key, value in headers if key in _CONTEXT_HEADERS}
        span = self._tracer.start_span(name, self._context.extract(sent), SpanKind.SERVER)
        passed_on: dict[str, str] = {}
        self._context.inject(passed_on, set_span_in_context(span))
        kept = [header for header in headers if header[0] not in _CONTEXT_HEADERS]
        return Trace(span), [*kept, *((key.encode(), value.encode()) for key, value in passed_on.items())]

    def close(self) -> None:
        """Export the remaining spans. Blocks for some seconds at most."""
        self._provider.shutdown()
