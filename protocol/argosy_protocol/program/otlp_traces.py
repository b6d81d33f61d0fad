"""Where spans go: OTLP over HTTP to a collector, from a bounded queue in a thread of the SDK.

Imported only if an endpoint is given, since it needs the extra `otlp`. The SDK's standard environment variables
(OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_RESOURCE_ATTRIBUTES) set the sampling, the limits of the queue, and resource
attributes.

Must not know: what spans are about. Invariant: what a client sent as its context is not logged.
"""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_EXPORT_TIMEOUT_S = 5.0
_CONTEXT_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""They warn of each malformed `traceparent` and `tracestate`, and quote it."""


def tracer_provider(endpoint: str, service: str, instance: str) -> TracerProvider:
    """Return a provider of tracers; its `shutdown` exports the remaining spans, and blocks for some seconds at most.

    Args:
        endpoint: the collector's URL; without a path, `/v1/traces` is added.
        service: `service.name` of the spans.
        instance: `service.instance.id`.
    """
    for name in _CONTEXT_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    named = Resource({"service.name": service, "service.instance.id": instance})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))
    )
    return provider
