"""ServerArgs: the flags of `argosy serve` beside the engine's own, with vLLM's and uvicorn's names where possible."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from argosy_engine.api.http.http_protocol import HttpLimits
from argosy_protocol.program.flags import Flag

ITERATION_TIMEOUT_S = 120.0
"""A core that said nothing for this long is taken for hung; a step of a large prompt on a slow CPU takes tens."""
_LIMITS = HttpLimits()
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
Keys = Annotated[
    tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=1024), Flag(is_repeatable=True)
]


class ServerArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the API server listens, whom it lets in, and how it stops. Times in seconds."""

    host: Annotated[str, Meta(min_length=1, max_length=253, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on")] = 8000
    api_key: Annotated[Keys, Meta(description="accepted bearer key; repeatable; also ARGOSY_API_KEY")] = ()
    admin_api_key: Annotated[
        Keys,
        Meta(
            description="key for /sleep, /wake_up and /reset_prefix_cache, instead of --api-key; repeatable; "
            "also ARGOSY_ADMIN_API_KEY"
        ),
    ] = ()
    any_model_name: Annotated[
        bool,
        Meta(
            description="answer requests for all model names, by the name asked for: names are resolved in front of "
            "the engine"
        ),
    ] = False
    guard_metrics: Annotated[bool, Meta(description="ask for the key on /metrics too")] = False
    shutdown_timeout: Annotated[
        Seconds, Meta(description="seconds to finish running requests on SIGTERM; 0: abort them")
    ] = 45.0
    engine_iteration_timeout: Annotated[
        Seconds,
        Meta(description="seconds without a sign of life from the engine core after which /health is 503"),
    ] = ITERATION_TIMEOUT_S
    h11_max_header_count: Annotated[Count, Meta(description="most headers of a request")] = (
        _LIMITS.max_headers
    )
    h11_max_incomplete_event_size: Annotated[
        Count, Meta(description="most bytes of a request's line and headers together")
    ] = _LIMITS.max_head_bytes
    timeout_keep_alive: Annotated[Seconds, Meta(description="seconds until an idle connection is closed")] = (
        75.0
    )
    """Longer than the router keeps idle connections, so that the router closes first."""
    timeout_headers: Annotated[
        Seconds, Meta(description="seconds that a client has to send a request's headers")
    ] = _LIMITS.header_timeout_s
    timeout_body: Annotated[
        Seconds,
        Meta(
            description=f"seconds over which a body must come at {_LIMITS.min_body_rate} bytes per second or faster"
        ),
    ] = _LIMITS.body_timeout_s
    disable_log_stats: Annotated[bool, Meta(description="no line of statistics in the log")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="least severe messages that are logged"),
    ] = "info"

    @property
    def http_limits(self) -> HttpLimits:
        """Bounds of each connection."""
        return HttpLimits(
            max_head_bytes=self.h11_max_incomplete_event_size,
            max_headers=self.h11_max_header_count,
            header_timeout_s=self.timeout_headers,
            body_timeout_s=self.timeout_body,
        )
