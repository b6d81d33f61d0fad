"""Exhausted file descriptors, at the start and later, end no process."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from argosy_engine.errors import ConfigError
from argosy_engine.osproc import MIN_FREE_DESCRIPTORS, require_free_descriptors
from forked_serves import serve_each
from processes import Server, free_port, running, wait_until, with_descriptors

pytestmark = pytest.mark.timeout(300)

SERVE = ["argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "--threads", "1"]
FEW = 140
"""Descriptors that an engine can just live with."""
QUESTION = {"model": "tiny", "prompt": "Once", "max_tokens": 3}


@pytest.mark.parametrize("count", [16, 100])
def test_too_few_descriptors_are_reported_at_the_start(count: int) -> None:
    """libzmq would end the process with SIGABRT, now here, now there."""
    command = with_descriptors(count, [sys.executable, "-m", *SERVE, "--port", str(free_port())])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "raise the limit (ulimit -n)" in done.stderr
    assert "Traceback" not in done.stderr


def test_any_number_of_descriptors_that_is_too_small_is_reported() -> None:
    counts = (16, 22, 26, 27, 28, 64, 100, 128)
    command_line = [*SERVE[1:], "--port", str(free_port())]
    outcomes = serve_each([command_line] * len(counts), counts)
    wrong = {
        count: outcome
        for count, outcome in zip(counts, outcomes, strict=True)
        if outcome.returncode != 2
        or "raise the limit (ulimit -n)" not in outcome.stderr
        or "Traceback" in outcome.stderr
    }
    assert not wrong


@pytest.mark.parametrize("free", [MIN_FREE_DESCRIPTORS - 1, MIN_FREE_DESCRIPTORS])
def test_as_many_descriptors_as_a_core_needs_are_enough(free: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128 + len(os.listdir("/proc/self/fd")), limits[1]))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in taken[-free:]:
            os.close(descriptor)
        del taken[-free:]
        if free < MIN_FREE_DESCRIPTORS:
            with pytest.raises(ConfigError, match=f"needs {MIN_FREE_DESCRIPTORS} free .*, and {free} of"):
                require_free_descriptors()
        else:
            require_free_descriptors()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_program_that_has_few_left_gets_an_error_and_lives_on() -> None:
    script = (
        "import os\n"
        "from argosy_engine import LLMEngine, EngineArgs\n"
        "from argosy_engine.errors import ConfigError\n"
        "taken = [os.open('/dev/null', 0) for _ in range(80)]\n"
        "args = EngineArgs.of(model='builtin://tiny', device='cpu', threads=1)\n"
        "try:\n"
        "    LLMEngine.from_engine_args(args, multiprocess=True)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    command = with_descriptors(100, [sys.executable, "-P", "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert "raise the limit" in done.stdout


@contextmanager
def crowd(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            connections.append(connection)
        yield connections


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine that a crowd has connected to while it loaded."""
    port, log = free_port(), tmp_path_factory.mktemp("few") / "log"
    with running(
        [*SERVE, "--port", str(port)], log, port=port, descriptors=FEW, is_ready=lambda: is_listening(port)
    ) as up:
        with crowd(port, 300):
            wait_until(
                lambda: b"listening on" in log.read_bytes() or up.process.poll() is not None,
                "the model to load",
                120.0,
            )
        assert up.process.poll() is None, log.read_text()[-2000:]
        yield up
        assert up.stop() == 0, log.read_text()[-2000:]


def test_a_crowd_does_not_keep_an_engine_from_loading(server: Server) -> None:
    wait_until(lambda: ask(server.port) == 200, "an answer")


def ask(port: int) -> int:
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=QUESTION, timeout=60).status_code
    except httpx.TransportError:
        return 0


def test_a_connection_too_many_gets_503_and_the_others_are_served(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as known:
        assert known.post("/v1/completions", json=QUESTION).status_code == 200
        with crowd(server.port, 300) as silent:
            silent[-1].setblocking(True)
            silent[-1].settimeout(60)
            assert silent[-1].recv(1 << 16).startswith(b"HTTP/1.1 503 ")
            assert known.post("/v1/completions", json=QUESTION).status_code == 200
        wait_until(lambda: ask(server.port) == 200, "an answer to a new connection")


def test_a_process_without_a_free_descriptor_continues_to_serve(server: Server) -> None:
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    with httpx.Client(base_url=server.url, timeout=60) as known:
        assert known.post("/v1/completions", json=QUESTION).status_code == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with crowd(server.port, 20):
            for _ in range(3):
                assert known.post("/v1/completions", json=QUESTION).status_code == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: ask(server.port) == 200, "an answer to a new connection")
