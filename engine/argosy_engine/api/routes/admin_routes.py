"""Administrative routes: sleep and wake, the prefix cache. `http.auth_middleware` checks who may call them.

Names and parameters are vLLM's. `POST /sleep?level=1&mode=abort`: level 1 frees weights and KV cache and leaves the
checkpoint in the page cache, level 2 drops that too; mode `abort` fails running requests with 503, `wait` lets them
finish. Asleep, the engine is not ready, and requests get 503.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, cast

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from argosy_engine.errors import UtilityFailed
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_protocol.errors import BadRequest, InternalError, Unavailable

_LEVELS = {"1": 1, "2": 2}
_MODES = ("abort", "wait")


def add_admin_routes(
    app: FastAPI,
    llm: Callable[[], AsyncLLM],
    measured: Callable[[Literal["sleep", "wake"]], AbstractContextManager[None]],
) -> None:
    """Add the routes to `app`.

    Args:
        llm: returns the loaded engine, or raises Unavailable.
        measured: measures a block that puts the engine to sleep or wakes it.
    """

    @app.post("/sleep")
    async def sleep(request: Request) -> Response:
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        if level not in _LEVELS:
            raise BadRequest("level must be 1 or 2", param="level")
        if mode not in _MODES:
            raise BadRequest("mode must be abort or wait", param="mode")
        try:
            with measured("sleep"):
                await llm().sleep(_LEVELS[level], cast(Literal["abort", "wait"], mode))
        except UtilityFailed as error:
            raise InternalError(f"the engine cannot sleep: {error}") from None
        return Response(status_code=200)

    @app.post("/wake_up")
    async def wake_up() -> Response:
        try:
            with measured("wake"):
                await llm().wake_up()
        except UtilityFailed as error:
            raise InternalError(f"the engine cannot wake up: {error}") from None
        return Response(status_code=200)

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return _json({"is_sleeping": llm().is_sleeping})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        if not await llm().reset_prefix_cache():
            raise Unavailable("requests are running; the prefix cache was kept", retry_after_s=1.0)
        return Response(status_code=200)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
