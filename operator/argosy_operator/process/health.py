"""The operator's health port: `/healthz`, `/readyz` and `/metrics`.

Invariants: ready means that something can be read and all of that was listed, whether this operator leads or waits to;
alive means that the last resync is at most three periods ago, so that a process whose watches or API access died
silently is restarted. Neither depends on a namespace that is refused while another one is not.
"""

from __future__ import annotations

import time
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from argosy_operator.reconcile.controller import Controller

_PERIODS: Final = 3
"""Resync periods without a resync after which the process counts as dead."""


def health_app(controller: Controller, *, resync_seconds: float) -> web.Application:
    """The application; the caller serves it."""

    async def healthz(request: web.Request) -> web.Response:
        age = time.monotonic() - controller.resynced_at
        alive = age < _PERIODS * resync_seconds
        body = {"alive": alive, "lastResyncSeconds": round(age, 1), "queuedKeys": len(controller.queue)}
        return web.json_response(body, status=200 if alive else 503)

    async def readyz(request: web.Request) -> web.Response:
        reason, unreadable = controller.unready_reason, controller.lister.unreadable
        body: dict[str, Any] = {"ready": not reason, "leading": controller.is_leading}
        body |= ({"reason": reason} if reason else {}) | ({"unreadable": unreadable} if unreadable else {})
        return web.json_response(body, status=503 if reason else 200)

    async def metrics(request: web.Request) -> web.Response:
        controller.count_services()
        return web.Response(
            body=generate_latest(controller.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app
