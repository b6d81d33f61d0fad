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


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for a server: Linux gives it to no socket that asks for any port, and lets one with SO_REUSEADDR
    that asks for it listen."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        port: int = reservation.getsockname()[1]
        yield port


@contextmanager
def running(*arguments: str, modules: Path | None = None) -> Iterator[str]:
    """Run `argosy` with the arguments until the block ends; yield its URL.

    Args:
        modules: a directory of modules that it may import.
    """
    with reserved_port() as port:
        yield from _running(port, arguments, modules)


def _running(port: int, arguments: tuple[str, ...], modules: Path | None) -> Iterator[str]:
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
    with (
        reserved_port() as admin_port,
        running("router", "--replica", engine, "--admin-port", str(admin_port)) as url,
    ):
        yield url


@pytest.fixture(scope="session", params=["engine", "router"])
def base_url(request: pytest.FixtureRequest) -> str:
    """What an OpenAI SDK is told: an engine, and a router in front of it."""
    return f"{request.getfixturevalue(request.param)}/v1"
