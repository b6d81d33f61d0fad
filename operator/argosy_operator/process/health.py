"""The operator's health port: `/healthz`, `/readyz` and `/metrics`.

Invariants: ready means that something can be read and all of that was listed, whether this operator leads or waits to;
alive means that the last resync is at most three periods ago, so that a process whose watches or API access died
silently is restarted; neither depends on a namespace that is refused while another one is not; metrics are written out
once in METRICS_PAUSE at most, as any pod of the cluster may ask for them, and they take a moment for each service; of
more than MAX_CONNECTIONS connections the oldest of the address that has most are ended, whether a request is under way
or never comes, and with it what nobody has read of an answer, so that one pod takes neither the memory nor the probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from argosy_operator.reconcile.controller import Controller
from argosy_protocol.program.listen import explain_listen_errors

MAX_CONNECTIONS: Final = 64
"""Kubelet, Prometheus and people have few. Each takes some kilobytes, and with the head of a request that does not end
about a megabyte."""
METRICS_PAUSE: Final = 1.0
"""Seconds for which whoever asks for metrics gets the same."""
_PERIODS: Final = 3
"""Resync periods without a resync after which the process counts as dead."""


def health_app(
    controller: Controller, *, resync_seconds: float, now: Callable[[], float] = time.monotonic
) -> web.Application:
    """The application; the caller serves it. `now` is a monotonic clock."""

    async def healthz(request: web.Request) -> web.Response:
        age = now() - controller.resynced_at
        alive = age < _PERIODS * resync_seconds
        body = {"alive": alive, "lastResyncSeconds": round(age, 1), "queuedKeys": len(controller.queue)}
        return web.json_response(body, status=200 if alive else 503)

    async def readyz(request: web.Request) -> web.Response:
        reason, unreadable = controller.unready_reason, controller.lister.unreadable
        body: dict[str, Any] = {"ready": not reason, "leading": controller.is_leading}
        body |= ({"reason": reason} if reason else {}) | ({"unreadable": unreadable} if unreadable else {})
        return web.json_response(body, status=503 if reason else 200)

    written: tuple[float, bytes] | None = None

    async def metrics(request: web.Request) -> web.Response:
        nonlocal written
        if written is None or now() - written[0] >= METRICS_PAUSE:
            controller.count_services()
            written = now(), generate_latest(controller.metrics.registry)
        return web.Response(body=written[1], headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


def _make_room(http: web.Server) -> None:
    """End connections until there is room for one more. Not by closing them: that waits until the peer has read all
    that was written, which may be never."""
    by_address: dict[str, deque[asyncio.Transport]] = {}
    num_open = 0
    for connection in http.connections:  # the oldest first
        transport = connection.transport
        if isinstance(transport, asyncio.Transport) and not transport.is_closing():
            peer = transport.get_extra_info("peername") or ("",)
            by_address.setdefault(str(peer[0]), deque()).append(transport)
            num_open += 1
    for _ in range(num_open + 1 - MAX_CONNECTIONS):
        max(by_address.values(), key=len).popleft().abort()


@contextlib.asynccontextmanager
async def serve_health(app: web.Application, port: int, host: str = "") -> AsyncIterator[int]:
    """Serve the application while the context lasts; yields the port, which is a free one for 0.

    Args:
        host: all addresses if empty.

    Raises:
        CannotListen: the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    http = runner.server

    def accept() -> asyncio.BaseProtocol:
        _make_room(http)
        return http()

    try:
        with explain_listen_errors(host, port, port_flag="--health-port"):
            server = await asyncio.get_running_loop().create_server(accept, host or None, port)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()
