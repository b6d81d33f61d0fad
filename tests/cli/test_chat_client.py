"""The chat client over real sockets: whole, interrupted and refused streams."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from argosy.commands.chat import ChatClient, Delta
from argosy.errors import CommandError

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(delta: bytes) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":' + delta + b"}]}\n\n"


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Gives `answer` to one connection and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while b"}" not in connection.recv(1 << 16):
                    pass
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread.join()


def chat(answer: bytes) -> list[Delta]:
    with server(answer) as url, ChatClient(url, "", 10.0) as endpoint:
        return list(endpoint.chat({"model": "tiny"}))


def test_text_and_reasoning_come_as_they_are() -> None:
    events = (
        event(b'{"role":"assistant"}') + event(b'{"reasoning_content":"hm"}') + event(b'{"content":"hi"}')
    )
    assert chat(STREAM + events + b"data: [DONE]\n\n") == [Delta("hm", is_reasoning=True), Delta("hi")]


def test_the_last_piece_says_why_the_answer_ended() -> None:
    end = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"length"}]}\n\n'
    assert chat(STREAM + end + b"data: [DONE]\n\n") == [Delta("hi"), Delta("", finish_reason="length")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (STREAM + event(b'{"content":"hi"}'), "the stream broke off"),
        (
            STREAM + b'data: {"error":{"message":"the replica failed"}}\n\n',
            "the stream ended: the replica failed",
        ),
        (b'HTTP/1.1 400 X\r\n\r\n{"error":{"message":"too long"}}', "400 too long"),
        (
            b'HTTP/1.1 400 X\r\n\r\n{"error":{"message":"Expected `float` >= 0.0","param":"temperature"}}',
            "400 Expected `float` >= 0.0 \\(temperature\\)",
        ),
        (
            b'HTTP/1.1 400 X\r\n\r\n{"error":{"message":"suffix is not supported","param":"suffix"}}',
            "400 suffix is not supported$",
        ),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\n\r\noops!", "502 Bad Gateway"),
        (b"", "no answer from"),
    ],
)
def test_failures_are_reported(answer: bytes, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        chat(answer)
