"""Routes of the engine's state: health, readiness, version, load, metrics and telemetry."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import FastAPI, Query
from starlette.responses import Response, StreamingResponse

from argosy_engine.api.served_engine import Engine
from argosy_protocol import __version__, headers
from argosy_protocol.hot_prefixes import (
    HOT_PREFIXES_CONTENT_TYPE,
    HOT_PREFIXES_PATH,
    MAX_TOKENS,
    HotPrefixReport,
)

MAX_WAIT_S: Final = 30.0


def add_state_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`. `/ping` is Amazon SageMaker's name of `/health`."""

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        return Response(status_code=200 if engine.is_healthy else 503)

    @app.get("/ready")
    async def ready(wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> Response:
        """While the engine starts, the answer may be held back for `wait` seconds: Kubernetes asks once a second at
        most, and would notice that much later."""
        if wait:
            await engine.wait_started(wait)
        return _json({"status": engine.status}, 200 if engine.is_ready else 503)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": engine.server_load})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await engine.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get(HOT_PREFIXES_PATH)
    async def hot_prefixes(max_tokens: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = MAX_TOKENS) -> Response:
        llm = engine.loaded
        report = HotPrefixReport(
            model_fingerprint=llm.config.model_fingerprint, prefixes=engine.prefix_hits.hottest(max_tokens)
        )
        return Response(msgspec.msgpack.encode(report), media_type=HOT_PREFIXES_CONTENT_TYPE)

    @app.get(headers.TELEMETRY_PATH)
    async def telemetry() -> StreamingResponse:
        return StreamingResponse(engine.telemetry.stream(), media_type=headers.TELEMETRY_CONTENT_TYPE)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
