"""The fake cluster behind a real HTTP server, named by KUBECONFIG."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from fake_http import FakeApiServer
from fake_kubernetes import FakeKubernetes

PATIENCE = 60


@asynccontextmanager
async def served(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeApiServer]:
    """The fake cluster as KUBECONFIG's cluster."""
    server = FakeApiServer(cluster)
    async with served_app(server.app(), tmp_path, monkeypatch):
        yield server


@asynccontextmanager
async def served_app(
    app: web.Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """An API server as KUBECONFIG's cluster."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(path))
    try:
        yield
    finally:
        await runner.cleanup()


async def until(cluster: FakeKubernetes, operator: asyncio.Task[int], condition: Callable[[], bool]) -> None:
    """Lets the cluster act until the condition holds, while the operator runs."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            assert not operator.done(), operator
            await asyncio.sleep(0.02)
            cluster.step()
