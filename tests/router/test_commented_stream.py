"""A response that continues in a stream whose head and comments were already sent."""

from __future__ import annotations

import pytest

from argosy_router.proxy.answer import answer_event


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_whole_answer_is_one_event_whatever_its_lines_end_with(end: bytes) -> None:
    body = b'{"error":' + end + b'"data: no event"}' + end
    event = answer_event(502, body, b"/v1/completions")
    assert event == b'data: {"error": "data: no event"}\n\n'


def test_an_error_of_anthropics_api_is_an_event_of_that_name() -> None:
    event = answer_event(502, b'{"type":"error"}', b"/v1/messages")
    assert event == b'event: error\ndata: {"type":"error"}\n\n'
