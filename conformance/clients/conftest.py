"""An engine and a router in front of it, run by the interpreter that has them (`ARGOSY_PYTHON`)."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_TIMEOUT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running(*arguments: str, modules: Path | None = None) -> Iterator[str]:
    """Run `argosy` with the arguments until the block ends; yield its URL.

    Args:
        modules: a directory of modules that it may import.
    """
    port = free_port()
    command = [os.environ["ARGOSY_PYTHON"], "-m", "argosy", *arguments, "--port", str(port)]
    paths = [os.environ.get("PYTHONPATH", ""), *([str(modules)] if modules is not None else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while not is_ready(f"{url}/ready"):
            assert process.poll() is None, f"{command} exited with {process.returncode}"
            assert time.monotonic() < deadline, f"{command} is not ready after {START_TIMEOUT_S} s"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    with running("serve", "builtin://tiny", "--device", "cpu", "--dtype", "float32") as url:
        yield url


@pytest.fixture(scope="session")
def router(engine: str) -> Iterator[str]:
    with running("router", "--replica", engine, "--admin-port", str(free_port())) as url:
        yield url


@pytest.fixture(scope="session", params=["engine", "router"])
def base_url(request: pytest.FixtureRequest) -> str:
    """What an OpenAI SDK is told: an engine, and a router in front of it."""
    return f"{request.getfixturevalue(request.param)}/v1"
