"""Cutting a stream of server-sent events at event boundaries."""

from __future__ import annotations

import re
import time
import timeit

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy_router.http.sse import (
    MAX_EVENT_BYTES,
    EventCutter,
    EventTooLarge,
    named_data,
    named_events,
    response_events,
    without_comments,
)

LINES = re.compile(rb"^event: ?response\.(?:completed|failed)\r?$", re.MULTILINE)
DATA = re.compile(rb"^event: ?response\.(?:completed|failed)\r?\ndata: ?(.*?)\r?$", re.MULTILINE)


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


@pytest.mark.parametrize("line", [b":\n", b"\n", b": ping\r\n", b"\r"])
def test_the_time_to_drop_comments_grows_with_their_number(line: bytes) -> None:
    """CPU times are compared: 16 times as many took 256 times as long, and an engine may send four megabytes."""

    def cpu_s(number: int) -> float:
        events = line * number + b"data: a\n\n"
        return min(
            timeit.repeat(lambda: without_comments(events), timer=time.process_time, number=1, repeat=3)
        )

    assert without_comments(line * 9 + b"data: a\n\n") == b"data: a\n\n"
    assert cpu_s(320_000) < 64 * max(cpu_s(20_000), 0.0005)


@settings(deadline=None)
@given(st.lists(st.sampled_from([":", ":ids 0 1", ": ping", "\n", "\r\n", "\r", "data: a", "x"]), max_size=9))
def test_comments_are_dropped_up_to_an_event_or_token_ids(pieces: list[str]) -> None:
    given = rest = "".join(pieces).encode()
    while rest.startswith((b":", b"\n", b"\r")) and not rest.startswith(b":ids "):
        line_end = re.search(rb"\r\n|\n|\r", rest)
        if line_end is None:
            break
        rest = rest[line_end.end() :]
    assert without_comments(given) == rest


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "event: response.completed",
                "event:response.failed",
                "x",
                "\n",
                "\r\n",
                "data: a",
                "data:b",
                "event: ",
            ]
        ),
        max_size=9,
    )
)
def test_an_event_is_found_by_the_line_with_its_name(pieces: list[str]) -> None:
    events, name = "".join(pieces).encode(), response_events(b"completed", b"failed")
    assert list(named_events(events, name)) == [found.start() for found in LINES.finditer(events)]
    found, expected = named_data(events, name), DATA.search(events)
    assert (found and events[found[0] : found[1]]) == (expected and expected[1])
