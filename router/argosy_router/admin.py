"""The admin port: what operators, probes and people ask the router about itself.

Owns: the admin routes. Must not know: the data plane's connections.
Invariant: with a fleet key, everything but `/health`, `/ready` and `/metrics` needs the admin key derived from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Query, Request, Response

from argosy_engine.protocol.errors import ApiError, BadRequest, PayloadTooLarge, Unauthorized
from argosy_engine.protocol.keys import KeyRing, internal_key
from argosy_engine.protocol.openai import decode_request
from argosy_engine.protocol.report import ADMIN_KEY_UID, REPORT_PATH
from argosy_router.explain import explain
from argosy_router.fleet import Fleet
from argosy_router.metrics import CONTENT_TYPE, Metrics
from argosy_router.proxy.call import SESSION_HEADER, find_service, prompt_of
from argosy_router.proxy.decisions import CAPACITY, DecisionLog

MAX_WAIT_S = 60.0
MAX_EXPLAINED_BYTES = 4 * 1024 * 1024
"""A million tokens of text; decoding more would hold up the data plane, which shares this loop."""
_JSON = "application/json"


def admin_keys(fleet_key: bytes) -> KeyRing:
    """Keys of the internal routes; empty (open) without a fleet key."""
    return KeyRing([internal_key(fleet_key, ADMIN_KEY_UID)] if fleet_key else [])


def build_admin(
    fleet: Fleet,
    metrics: Metrics,
    decisions: DecisionLog,
    keys: KeyRing,
    is_ready: Callable[[], bool],
    name: str,
) -> FastAPI:
    """The admin application. `name` is how the router calls itself in reports."""
    app = FastAPI(title="Argosy router", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ApiError)
    def refuse(_: Request, error: ApiError) -> Response:
        return Response(error.body(), error.http_status, media_type=_JSON)

    def guard(request: Request) -> None:
        if keys and not keys.accepts(request.headers.get("authorization")):
            raise Unauthorized("missing or wrong admin key")

    guarded = [Depends(guard)]

    @app.get("/health")
    async def health() -> Response:
        return Response(b"{}", media_type=_JSON)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(b"{}", 200 if is_ready() else 503, media_type=_JSON)

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE.decode()})

    @app.get(REPORT_PATH, dependencies=guarded)
    async def report(
        after: Annotated[int, Query(ge=-1)] = -1, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
    ) -> Response:
        if wait and after >= 0:
            await fleet.wait_for_change(after, wait)
        return Response(msgspec.json.encode(fleet.report(name)), media_type=_JSON)

    @app.get("/decisions", dependencies=guarded)
    async def latest(
        limit: Annotated[int, Query(ge=1, le=CAPACITY)] = 100,
        model: Annotated[str, Query(max_length=512)] = "",
    ) -> Response:
        return Response(msgspec.json.encode(list(decisions.latest(limit, model))), media_type=_JSON)

    @app.get("/explain", dependencies=guarded)
    async def explain_prompt(
        model: Annotated[str, Query(max_length=512)],
        prompt: Annotated[str, Query(max_length=8192)] = "",
        session: Annotated[str, Query(max_length=512)] = "",
    ) -> Response:
        message = {"role": "user", "content": prompt}
        body = msgspec.json.encode({"model": model, "messages": [message]})
        return Response(_explain(fleet, body, session.encode()), media_type=_JSON)

    @app.post("/explain", dependencies=guarded)
    async def explain_request(request: Request) -> Response:
        session = request.headers.get(SESSION_HEADER.decode(), "").encode("latin-1")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_EXPLAINED_BYTES:
                raise PayloadTooLarge(f"a request to explain may have {MAX_EXPLAINED_BYTES} bytes")
        return Response(_explain(fleet, bytes(body), session), media_type=_JSON)

    @app.get("/debug/replicas", dependencies=guarded)
    async def replicas() -> Response:
        return Response(msgspec.json.encode(_describe(fleet)), media_type=_JSON)

    return app


class _Kind(msgspec.Struct):
    """Tells a chat from a completion."""

    messages: msgspec.Raw = msgspec.Raw()


def _explain(fleet: Fleet, body: bytes, session: bytes) -> bytes:
    """The explanation for a request's body, as JSON.

    Raises:
        BadRequest, NotFound: as the main port would.
    """
    try:
        is_chat = bool(bytes(msgspec.json.decode(body, type=_Kind).messages))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"request body is not a JSON object: {str(error)[:200]}") from None
    decoded = decode_request("chat/completions" if is_chat else "completions", body)
    service = find_service(fleet, decoded)
    return msgspec.json.encode(
        explain(fleet, service, prompt_of(service, decoded, session), time.monotonic())
    )


def _describe(fleet: Fleet) -> list[dict[str, object]]:
    return [
        {
            "service": service.spec.key,
            "model": service.spec.model,
            "replica": replica.name,
            "url": replica.url,
            "state": replica.state,
            "routable": replica.is_routable,
            "suspect": replica.health.is_suspect,
            "inflight": replica.load.inflight,
            "requests": replica.load.requests,
            "queued_tokens": replica.load.queued_tokens,
            "kv_usage": replica.load.kv_usage,
            "prefill_tokens_per_s": replica.load.prefill_tokens_per_s,
            "decode_step_s": replica.load.decode_step_s,
            "idle_connections": replica.pool.idle,
            "bytes_per_token": round(service.bytes_per_token, 3),
            "index_chunks": len(service.index),
        }
        for service in fleet.services.values()
        for replica in service.replicas.values()
    ]


class AdminServer(uvicorn.Server):
    """uvicorn inside our loop: signals stay ours."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                limit_concurrency=256,
            )
        )

        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def address(self) -> tuple[str, int]:
        """Host and port once it listens."""
        listening: socket.socket = self.servers[0].sockets[0]
        host, port = listening.getsockname()[:2]
        return host, port
