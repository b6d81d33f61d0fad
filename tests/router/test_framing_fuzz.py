"""Framing under fire: random and mutated byte streams, against an independent parser (h11) and against themselves cut
into other pieces. No sockets: the connection's protocol is driven directly."""

from __future__ import annotations

import re
from itertools import pairwise

import h11
from hypothesis import event, given, settings
from hypothesis import strategies as st

from .framing_streams import CHUNKED, PLAIN, streams
from .server_in_memory import Message, ours


def theirs(data: bytes) -> list[Message]:
    """What h11 takes the stream for, up to its first error. Line ends before a request, and spaces around its target,
    are taken away: llhttp skips them, and no message can end there."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(re.sub(rb"^[\r\n]*([A-Z]+) +([^ \r\n]*) +", rb"\1 \2 ", data))
    messages: list[Message] = []
    head: h11.Request | None = None
    body = b""
    try:
        while True:
            heard = connection.next_event()
            if isinstance(heard, h11.Request):
                head, body = heard, b""
            elif isinstance(heard, h11.Data):
                body += bytes(heard.data)
            elif isinstance(heard, h11.EndOfMessage):
                assert head is not None
                messages.append((bytes(head.method), bytes(head.target), body))
                if connection.their_state is h11.DONE:
                    messages += theirs(connection.trailing_data[0])
                return messages
            else:
                return messages
    except h11.ProtocolError:
        return messages


# streams of bytes


@settings(max_examples=300, deadline=None)
@given(streams())
def test_accepted_requests_are_parsed_alike_by_h11(data: bytes) -> None:
    accepted, answers = ours([data])
    reference = theirs(data)
    event(f"accepted {len(accepted)}")
    assert accepted == reference[: len(accepted)], "we may be stricter, never of another opinion"
    refused = answers.count(b"HTTP/1.1 4")
    assert refused <= 1
    assert answers.count(b"HTTP/1.1 200") == len(accepted)


@settings(max_examples=100, deadline=None)
@given(streams(), st.lists(st.integers(0, 400), max_size=6))
def test_splitting_the_bytes_changes_nothing(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    whole = ours([data])
    assert ours([data[a:b] for a, b in pairwise(edges)]) == whole
    assert ours([data[n : n + 1] for n in range(len(data))]) == whole


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(PLAIN, CHUNKED), max_size=5))
def test_every_well_formed_request_is_accepted(requests: list[bytes]) -> None:
    data = b"".join(requests)
    accepted, answers = ours([data])
    assert len(accepted) == len(requests)
    assert accepted == theirs(data)
    assert b"HTTP/1.1 4" not in answers
