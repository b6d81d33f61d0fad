"""The connection pool of a replica."""

from __future__ import annotations

import asyncio

import pytest

from argosy_router.config import UpstreamLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.pool import ConnectionPool
from argosy_router.http.tls import UpstreamTls
from argosy_router.http.upstream_connection import UpstreamConnection
from argosy_router.http.upstream_errors import ConnectFailed

from .harness import DEADLINE_S


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".b"])
async def test_a_host_that_cannot_be_one_fails_its_waiter(host: str) -> None:
    failed: asyncio.Future[ConnectFailed] = asyncio.get_running_loop().create_future()

    class QueuedRequest:
        def on_connected(self, connection: UpstreamConnection) -> None:
            raise AssertionError

        def on_connect_failed(self, error: ConnectFailed) -> None:
            failed.set_result(error)

    wheel = TimerWheel(asyncio.get_running_loop())
    pool = ConnectionPool(f"http://{host}:80", UpstreamLimits(), wheel, UpstreamTls())
    pool.acquire(QueuedRequest())
    assert "connect failed" in str(await asyncio.wait_for(failed, DEADLINE_S))
    pool.close()
