"""The engine of an API process, as the flags want it: its names, and the spans of its requests."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from argosy_engine.api.served_engine import Engine
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_fetcher.errors import FetchError
from argosy_fetcher.source_uri import from_argument

if TYPE_CHECKING:
    from argosy_engine.api.observability.request_spans import RequestSpans


def make_engine(
    options: ServerArgs, args: EngineArgs, spans: RequestSpans | None, started: int | None = None
) -> Engine:
    """
    Args:
        spans: of `make_request_spans`; their owner closes them after the server.
        started: when, in seconds since the epoch; None: now.
    """
    return Engine(
        _names(args),
        options.engine_iteration_timeout,
        takes_any_name=options.any_model_name,
        options=options,
        spans=spans,
        started=started,
        root=root_of(args),
    )


def make_request_spans(options: ServerArgs, args: EngineArgs) -> RequestSpans | None:
    """Return what makes spans of requests; None without an endpoint for them.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if options.otlp_traces_endpoint is None:
        return None
    try:
        from argosy_engine.api.observability.request_spans import RequestSpans
        from argosy_protocol.program.otlp_traces import tracer_provider
    except ImportError:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: `pip install '.[otlp]'` in the checkout"
        ) from None
    provider = tracer_provider(options.otlp_traces_endpoint, "argosy-engine", socket.gethostname())
    return RequestSpans(provider, _names(args)[0])


def _names(args: EngineArgs) -> tuple[str, ...]:
    return args.served_model_name or (args.canonical_name,)


def root_of(args: EngineArgs) -> str:
    """Return the model as it was given, as in vLLM; the first name of one behind a URL, or in a bucket or registry,
    whose address clients need not know."""
    try:
        uri = from_argument(args.model)
    except FetchError:  # the load tells
        return _names(args)[0]
    if uri.scheme == "hf":
        return uri.location
    return _names(args)[0] if uri.is_remote else args.model
