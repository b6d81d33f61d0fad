"""The port that reports a fetch's progress: its answers, and that no client can occupy it."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from argosy_fetcher.progress_server import MAX_CONNECTIONS, ProgressServer
from argosy_protocol.program.listen import CannotListen
from argosy_protocol.reports import MAX_REPORT_BYTES, ModelProgress

REPORT = ModelProgress(source="hf://acme/tiny", phase="fetching", fetched_bytes=1, total_bytes=2)
DEADLINE_S = 60.0


def made(report: ModelProgress = REPORT) -> ProgressServer:
    return ProgressServer(0, lambda: report, host="127.0.0.1")


@pytest.fixture
def server() -> Iterator[ProgressServer]:
    with made() as server:
        yield server


def ask(server: ProgressServer, method: str = "GET", path: str = "/progress") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connect(server: ProgressServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)


def test_it_reports_the_progress_to_each_request(server: ProgressServer) -> None:
    for path in ("/progress", "/progress?x=1"):
        status, body = ask(server, path=path)
        assert (status, msgspec.json.decode(body, type=ModelProgress)) == (200, REPORT)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/progress", 405), ("GET", "/", 404), ("GET", "/progress/x", 404)]
)
def test_it_answers_nothing_else(server: ProgressServer, method: str, path: str, status: int) -> None:
    assert ask(server, method, path) == (status, b"")


@pytest.mark.parametrize("sent", [b"", b"GET", b"\r\n\r\n", b"\xff" * 100_000, b"GET /progress HTTP/1.1\r\n"])
def test_what_is_no_request_occupies_nothing(server: ProgressServer, sent: bytes) -> None:
    with connect(server) as client:
        try:
            client.sendall(sent)
        except ConnectionError:
            assert len(sent) > 4096  # the server has cut it off meanwhile
        assert ask(server)[0] == 200


def test_idle_connections_do_not_keep_others_out(server: ProgressServer) -> None:
    idle = [connect(server) for _ in range(3 * MAX_CONNECTIONS)]
    try:
        assert ask(server)[0] == 200
        cut = [client for client in idle if _is_cut(client)]
        assert len(cut) >= 2 * MAX_CONNECTIONS
        assert cut == idle[: len(cut)]  # the oldest
    finally:
        for client in idle:
            client.close()


def _is_cut(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_connections_cost_no_thread(server: ProgressServer) -> None:
    before = set(threading.enumerate())
    clients = [connect(server) for _ in range(MAX_CONNECTIONS)]
    assert ask(server)[0] == 200
    assert set(threading.enumerate()) <= before  # other tests' threads may end meanwhile
    for client in clients:
        client.close()


def test_a_report_that_would_not_be_read_is_shortened() -> None:
    with made(
        ModelProgress(source="é" * 1024, phase="fetching", total_bytes=2, note="\U0001f6a2" * 512)
    ) as server:
        _, body = ask(server)
    assert len(body) <= MAX_REPORT_BYTES
    assert msgspec.json.decode(body, type=ModelProgress).total_bytes == 2


def test_the_port_is_free_after_the_end_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    with made() as server, connect(server):
        pass
    assert set(threading.enumerate()) <= before
    with ProgressServer(server.port, lambda: REPORT, host="127.0.0.1"):
        pass


def test_a_port_that_is_taken_is_named_with_its_flag(server: ProgressServer) -> None:
    with pytest.raises(CannotListen, match="--progress-port"), ProgressServer(server.port, lambda: REPORT):
        pass
