"""The router's tests run on the loop of production."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest
import uvloop

from argosy_router.fleet import health, telemetry

from .engine_processes import engine_pool as engine_pool  # fixtures
from .engine_processes import engines as engines


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def heartbeats_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes: fake engines have no heartbeat but what tests announce."""
    monkeypatch.setattr(telemetry, "STALE_AFTER_S", 600.0)


@pytest.fixture
def ejections_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the test takes."""
    monkeypatch.setattr(health, "BASE_EJECTION_S", health.MAX_EJECTION_S)


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port where connections are neither accepted nor refused: its backlog is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        yield port
        for filler in fillers:
            filler.close()
