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
    with running(
        [*command, "--disable-log-stats", "--served-model-name", "tiny", "--timeout-write", "0.1"],
        log,
        port=port,
    ) as up:
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


TURN = {"messages": [{"role": "user", "content": "hello"}]}
LONG_FORMAT = {
    "type": "json_schema",
    "schema": {
        "type": "object",
        "properties": {"text": {"const": "on and " * 1500}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
"""For /v1/messages, which has no `ignore_eos`."""
ENDLESS = {
    "/v1/completions": LONG,
    "/v1/chat/completions": {**TURN, "max_tokens": 3000, "ignore_eos": True},
    "/v1/chat/completions/batch": {
        "messages": [TURN["messages"]] * 2,
        "max_tokens": 3000,
        "ignore_eos": True,
    },
    "/v1/messages": {**TURN, "max_tokens": 3000, "output_config": {"format": LONG_FORMAT}},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3000, "ignore_eos": True, "store": False},
}

STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")


def counts(client: httpx.Client, name: str) -> float:
    """Sum of all series of /metrics whose line begins so."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def aborted(client: httpx.Client) -> float:
    reason = '{engine="0",finished_reason="abort"'
    return counts(client, f"vllm:request_success_total{reason}")


@pytest.mark.parametrize(
    ("path", "streamed"), [*((path, False) for path in ENDLESS), *((path, True) for path in STREAMED)]
)
def test_a_request_is_aborted_when_its_client_leaves(server: Server, path: str, streamed: bool) -> None:
    body = {"model": "tiny", **ENDLESS[path]} | ({"stream": True} if streamed else {})
    with httpx.Client(base_url=server.url, timeout=60) as other:
        before = aborted(other)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(post(path, body))
            wait_until(lambda: other.get("/load").json()["server_load"], "the request to run")
        wait_until(lambda: other.get("/load").json()["server_load"] == 0, "its work to end")
        assert aborted(other) > before


def test_a_beam_search_ends_when_its_client_leaves(server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "use_beam_search": True, "n": 4}
    with httpx.Client(base_url=server.url, timeout=60) as other:
        before = counts(other, "vllm:generation_tokens_total")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(post("/v1/completions", body))
            wait_until(lambda: other.get("/load").json()["server_load"], "the request to run")
        wait_until(lambda: other.get("/load").json()["server_load"] == 0, "its work to end")
        assert counts(other, "vllm:generation_tokens_total") - before < 2000 * 4


def test_a_client_that_does_not_read_is_disconnected_and_its_request_aborted(server: Server) -> None:
    body = {**ENDLESS["/v1/chat/completions"], "stream": True, "logprobs": True, "top_logprobs": 20, "n": 4}
    with httpx.Client(base_url=server.url, timeout=60) as other, socket.socket() as client:
        before, slow = aborted(other), counts(other, "argosy_engine_slow_clients_total")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(post("/v1/chat/completions", body))
        wait_until(
            lambda: counts(other, "argosy_engine_slow_clients_total") == slow + 1, "the client to be cut off"
        )
        wait_until(lambda: other.get("/load").json()["server_load"] == 0, "its work to end")
        assert aborted(other) > before
