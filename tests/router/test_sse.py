"""Cutting a stream of server-sent events at event boundaries."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy_router.http.sse import MAX_EVENT_BYTES, EventCutter, EventTooLarge


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["data: a\n\n", "data: b\r\n\r\n", ": ping\n\n", "data: c\ndata: d\n\n", "data: e\r\r"]
        )
    ),
    st.text(alphabet="ab: \n", max_size=8),
    st.integers(1, 9),
)
def test_events_are_cut_at_blank_lines_only(events: list[str], rest: str, step: int) -> None:
    stream = ("".join(events) + rest).encode()
    cutter = EventCutter()
    forwarded = b""
    for start in range(0, len(stream), step):
        piece = cutter.feed(stream[start : start + step])
        forwarded += piece
        if piece:
            assert piece.endswith((b"\n\n", b"\n\r\n", b"\r\r"))
    assert forwarded + cutter.tail == stream
    assert len(forwarded) >= len("".join(events)) - 2  # a CR may still become a CRLF


def test_an_endless_event_is_refused() -> None:
    cutter = EventCutter()
    for _ in range(MAX_EVENT_BYTES // 65536):
        assert cutter.feed(b"x" * 65536) == b""
    with pytest.raises(EventTooLarge):
        cutter.feed(b"x")
