"""A response that continues in a stream whose head and comments were already sent."""

from __future__ import annotations

import pytest

from argosy_router.proxy.downstream.commented_stream import CommentedStream


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_finished = False

    def send(self, data: bytes) -> None:
        self.sent += data

    def finish(self) -> None:
        self.is_finished = True


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_whole_answer_is_one_event_whatever_its_lines_end_with(end: bytes) -> None:
    client = Client()
    stream = CommentedStream(client, b"/v1/completions")  # type: ignore[arg-type]
    stream.respond(502, b"", b'{"error":' + end + b'"data: no event"}' + end)
    assert client.sent == b'data: {"error": "data: no event"}\n\n'
    assert client.is_finished


def test_an_error_of_anthropics_api_is_an_event_of_that_name() -> None:
    client = Client()
    CommentedStream(client, b"/v1/messages").respond(502, b"", b'{"type":"error"}')  # type: ignore[arg-type]
    assert client.sent == b'event: error\ndata: {"type":"error"}\n\n'
