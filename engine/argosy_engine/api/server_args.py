"""ServerArgs: the flags of `argosy serve` besides EngineArgs, with vLLM's and uvicorn's names where possible."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from argosy_engine.api.http.http_server import CertificateFiles
from argosy_http.bounded_protocol import HttpLimits
from argosy_protocol.program.flags import Flag, InvalidValue, origins_problem

ITERATION_TIMEOUT_S = 120.0
"""A core without a heartbeat for this long counts as hung. A step of a large prompt on a slow CPU takes tens of
seconds."""
_LIMITS = HttpLimits()
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
FilePath = Annotated[str, Meta(min_length=1, max_length=4096)]
Keys = Annotated[
    tuple[Annotated[str, Meta(max_length=4096)], ...],
    Meta(max_length=1024),
    Flag(is_repeatable=True, takes_several=True),
]
Origins = Annotated[
    tuple[Annotated[str, Meta(max_length=2048)], ...], Meta(max_length=1024), Flag(is_json=True)
]
Names = Annotated[
    tuple[Annotated[str, Meta(max_length=256)], ...],
    Meta(max_length=1024),
    Flag(is_json=True, default='["*"]'),
]
ImportPaths = Annotated[
    tuple[Annotated[str, Meta(max_length=512, pattern=r"^\w+(\.\w+)+$")], ...],
    Meta(max_length=64),
    Flag(is_repeatable=True, form="must be an import path such as package.module.Class"),
]
_HTTP_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class ServerArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the API server: address, keys, limits, shutdown. Times in seconds."""

    host: Annotated[str, Meta(min_length=1, max_length=253, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on")] = 8000
    headless: Annotated[
        bool,
        Meta(
            description="run the workers of this machine only, for an API server on node 0 (--nnodes, --node-rank)"
        ),
    ] = False
    uds: Annotated[
        FilePath | None,
        Meta(description="path of a Unix domain socket to listen on, instead of --host and --port"),
    ] = None
    api_server_count: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="number of API processes in front of the engine's cores; more than one if a single one is busy "
            "all the time while the cores wait",
        ),
        Flag(short="-asc"),
    ] = 1
    ssl_keyfile: Annotated[FilePath | None, Meta(description="key of --ssl-certfile, in PEM")] = None
    ssl_certfile: Annotated[
        FilePath | None, Meta(description="certificate chain in PEM; the server then speaks HTTPS only")
    ] = None
    ssl_ca_certs: Annotated[
        FilePath | None,
        Meta(description="authorities in PEM, one of which must have signed a client's certificate"),
    ] = None
    enable_ssl_refresh: Annotated[
        bool, Meta(description="read the certificate and its key anew when their files change")
    ] = False
    root_path: Annotated[
        Annotated[str, Meta(max_length=1024, pattern=r"^(/[^?#\s]*)?$")] | None,
        Meta(description="prefix of all paths at a proxy in front, which may strip it or not"),
        Flag(form="must begin with / and have no ?, # or white space"),
    ] = None
    api_key: Annotated[
        Keys,
        Meta(
            description="accepted bearer key, or several; repeatable; also ARGOSY_API_KEY or VLLM_API_KEY, separated "
            "by commas"
        ),
    ] = ()
    api_keys_file: Annotated[
        FilePath | None,
        Meta(
            description="file with an accepted key per line, besides those of --api-key; read again within a second of "
            "a change, and all of its keys are valid at once. Without the file, or keys in it, its keys are refused"
        ),
    ] = None
    admin_api_key: Annotated[
        Keys,
        Meta(
            description="key for /sleep, /wake_up, /is_sleeping, /reset_prefix_cache and /server_info, instead of "
            "--api-key, or several; repeatable; also ARGOSY_ADMIN_API_KEY, separated by commas"
        ),
    ] = ()
    allowed_origins: Annotated[
        Origins,
        Meta(
            description='JSON list of the origins whose pages in browsers may call the engine; ["*"]: all; none if '
            "left out"
        ),
    ] = ()
    allowed_methods: Annotated[
        Names, Meta(description='JSON list of the methods that such pages may use; ["*"]: all')
    ] = ("*",)
    allowed_headers: Annotated[
        Names, Meta(description='JSON list of the headers that such pages may send; ["*"]: all')
    ] = ("*",)
    allow_credentials: Annotated[
        bool, Meta(description="whether browsers send cookies and client certificates with such calls")
    ] = False
    middleware: Annotated[
        ImportPaths,
        Meta(
            description="import path of an ASGI middleware class, or of a function for FastAPI's "
            "`middleware('http')`; it sees keys and prompts; repeatable, the last one is the outermost"
        ),
    ] = ()
    stream_interval: Annotated[
        Count,
        Meta(
            description="tokens of a choice in each event of a stream, but the first and the last; a request's own "
            "`stream_interval` counts if it is larger"
        ),
    ] = 1
    any_model_name: Annotated[
        bool,
        Meta(
            description="accept requests for any model name and answer with that name, for a router that resolves "
            "names in front of the engine"
        ),
    ] = False
    guard_metrics: Annotated[bool, Meta(description="require the key on /metrics, too")] = False
    warm_up_from: Annotated[
        Annotated[str, Meta(max_length=2048, pattern=r"^https?://[^/?#\s]+/?$")] | None,
        Meta(
            description="URL of the other replicas, whose hottest prefixes are computed before the engine is ready; "
            "also ARGOSY_WARM_UP_FROM; without effect with several API processes"
        ),
        Flag(form="must be a URL such as http://HOST:PORT, without a path"),
    ] = None
    warm_up_timeout: Annotated[
        Seconds, Meta(description="seconds for which that may delay the engine; 0: not at all")
    ] = 5.0
    """While the load grows, replicas that are missing cost more than cold caches do."""
    shutdown_timeout: Annotated[
        Seconds, Meta(description="seconds to finish running requests on SIGTERM; 0: abort them")
    ] = 45.0
    engine_iteration_timeout: Annotated[
        Seconds,
        Meta(description="seconds without a heartbeat of the engine core after which /health answers 503"),
    ] = ITERATION_TIMEOUT_S
    h11_max_header_count: Annotated[Count, Meta(description="maximum number of headers of a request")] = (
        _LIMITS.max_headers
    )
    h11_max_incomplete_event_size: Annotated[
        Count, Meta(description="maximum size of a request's line and headers together, in bytes")
    ] = _LIMITS.max_head_bytes
    timeout_keep_alive: Annotated[Seconds, Meta(description="seconds until an idle connection is closed")] = (
        75.0
    )
    """Longer than the router keeps idle connections, so that the router closes first."""
    timeout_headers: Annotated[
        Seconds, Meta(description="seconds in which a client must send a request's headers")
    ] = _LIMITS.header_timeout_s
    timeout_body: Annotated[
        Seconds,
        Meta(
            description="period in seconds in which a client must send a body at an average of at least "
            f"{_LIMITS.min_body_rate} bytes per second"
        ),
    ] = _LIMITS.body_timeout_s
    timeout_write: Annotated[
        Seconds,
        Meta(
            description="seconds for which a client may leave 64 KiB of its response unread before it is disconnected "
            "and its request aborted"
        ),
    ] = _LIMITS.write_stall_s
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(description="log probabilities name tokens `token_id:ID`, unless a request says otherwise"),
    ] = False
    enable_force_include_usage: Annotated[
        bool, Meta(description="every event of every stream has the usage so far, whether asked for or not")
    ] = False
    enable_request_id_headers: Annotated[
        bool,
        Meta(
            description="put x-request-id on every response; those of endpoints that generate always have it"
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        Meta(description="answer /tokenizer_info with the settings of the tokenizer and the chat template"),
    ] = False
    disable_fastapi_docs: Annotated[bool, Meta(description="do not answer /openapi.json and /docs")] = False
    enable_log_requests: Annotated[
        bool, Meta(description="log a line per request with its id and its numeric parameters, without texts")
    ] = False
    access_log: Annotated[
        bool,
        Meta(
            description="log a line per request at its end: id, path, status, tokens and times, without texts and keys"
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        Annotated[str, Meta(min_length=1, max_length=2048)] | None,
        Meta(
            description="send a span per choice to this OpenTelemetry collector (OTLP over HTTP; extra `otlp`)"
        ),
        Flag(metavar="URL"),
    ] = None
    disable_log_stats: Annotated[bool, Meta(description="do not log lines of statistics")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lowest severity of messages to log"),
    ] = "info"

    def check(self) -> None:
        """
        Raises:
            InvalidValue: a flag needs another one, or an origin, method, header or endpoint cannot be one.
        """
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(
            ("http://", "https://")
        ):
            raise InvalidValue(
                "--otlp-traces-endpoint must be an http:// or https:// URL, such as http://collector:4318: spans are "
                "sent by OTLP over HTTP, not by gRPC"
            )
        if problem := origins_problem(self.allowed_origins):
            raise InvalidValue(problem)
        for flag, names in (
            ("allowed-methods", self.allowed_methods),
            ("allowed-headers", self.allowed_headers),
        ):
            for name in names:
                if _HTTP_TOKEN.fullmatch(name) is None:
                    raise InvalidValue(
                        f'--{flag}: {name[:128]!r} is no HTTP name: write such, or "*" for all'
                    )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise InvalidValue("--ssl-certfile and --ssl-keyfile need each other")
        for name, value in (
            ("ssl-ca-certs", self.ssl_ca_certs),
            ("enable-ssl-refresh", self.enable_ssl_refresh),
        ):
            if value and self.ssl_certfile is None:
                raise InvalidValue(f"--{name} needs --ssl-certfile and --ssl-keyfile")

    @property
    def certificate(self) -> CertificateFiles | None:
        """Files for HTTPS; None for plain HTTP."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        return CertificateFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    @property
    def http_limits(self) -> HttpLimits:
        """Limits of each connection."""
        return HttpLimits(
            max_head_bytes=self.h11_max_incomplete_event_size,
            max_headers=self.h11_max_header_count,
            header_timeout_s=self.timeout_headers,
            body_timeout_s=self.timeout_body,
            write_stall_s=self.timeout_write,
        )
