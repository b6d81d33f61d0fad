"""One engine and one router in front of it, which the SDKs of all clients are tried against."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from argosy_protocol.reports import REPORT_PATH
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
    port, admin_port = free_port(), free_port()
    arguments = ["argosy", "router", "--port", str(port), "--admin-port", str(admin_port)]

    def is_routable() -> bool:
        """A router is ready without its replicas if these take long to answer, as on a busy machine."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}{REPORT_PATH}", timeout=5) as response:
                return any(replica["routable"] for replica in json.load(response)["replicas"])
        except (urllib.error.URLError, OSError):
            return False

    log = tmp_path_factory.mktemp("router") / "log"
    with running([*arguments, "--replica", engine.url], log, port=port, is_ready=is_routable) as up:
        yield up


@pytest.fixture(scope="session", params=["engine", "router"])
def base_url(request: pytest.FixtureRequest) -> str:
    """What an OpenAI SDK is told: an engine, and a router in front of it."""
    server: Server = request.getfixturevalue(request.param)
    return f"{server.url}/v1"
