"""One engine and one router in front of it, which the SDKs of all clients are tried against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from processes import Server, free_port, running
from served_engine import SERVE_TINY

ARGUMENTS = [*SERVE_TINY, "--dtype", "float32", "--served-model-name", "tiny", "--disable-log-stats"]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    with running(
        [*ARGUMENTS, "--port", str(port)], tmp_path_factory.mktemp("engine") / "log", port=port
    ) as up:
        yield up


@pytest.fixture(scope="session")
def router(engine: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    arguments = ["argosy", "router", "--port", str(port), "--admin-port", str(free_port())]
    with running(
        [*arguments, "--replica", engine.url], tmp_path_factory.mktemp("router") / "log", port=port
    ) as up:
        yield up


@pytest.fixture(scope="session", params=["engine", "router"])
def base_url(request: pytest.FixtureRequest) -> str:
    """What an OpenAI SDK is told: an engine, and a router in front of it."""
    server: Server = request.getfixturevalue(request.param)
    return f"{server.url}/v1"
