"""Clients that disconnect at any moment: their work ends, and nothing is logged."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from processes import Server, free_port, running, wait_until

LONG = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello " * 30_000}], "max_tokens": 3000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log, port = tmp_path_factory.mktemp("leave") / "log", free_port()
    command = ["argosy_engine.api.serve", "builtin://tiny", "--threads", "1", "--port", str(port)]
    with running([*command, "--disable-log-stats"], log, port=port) as up:
        yield up


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    ("sent", "reads"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", 0),
        (post("/v1/completions", LONG)[:-10], 0),
        (post("/v1/chat/completions", CHAT)[:-10], 0),
        (post("/v1/embeddings", {"input": "x" * 1000})[:-10], 0),
        (post("/v1/completions", LONG), 0),
        (post("/v1/completions", {**LONG, "stream": True}), 1000),
        (post("/v1/chat/completions", CHAT), 0),
        (post("/v1/embeddings", {"input": ["hello " * 2000] * 20}), 0),
        (b"GET /internal/telemetry HTTP/1.1\r\nhost: x\r\n\r\n", 10),
        (b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", 0),
    ],
)
def test_nothing_is_logged_and_no_work_continues(
    server: Server, sent: bytes, reads: int, resets: bool
) -> None:
    before = server.log.read_text()
    with httpx.Client(base_url=server.url, timeout=60) as other:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(sent)
            other.get("/health")  # the server has read what was sent
            if reads:
                client.recv(reads)
            if resets:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for _ in range(3):  # it has seen the end, too
            other.get("/health")
        wait_until(lambda: other.get("/load").json()["server_load"] == 0, "its work to end")
    assert server.log.read_text() == before
