"""Framing under fire: random and mutated byte streams, against an independent parser (h11) and against themselves cut
into other pieces. No sockets: the connection's protocol is driven directly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import cast

import h11
from hypothesis import event, given, settings
from hypothesis import strategies as st

from argosy_protocol.errors import ApiError
from argosy_router.config import ServerLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.messages import Request
from argosy_router.http.server_connection import ServerConnection, ServerState

Message = tuple[bytes, bytes, bytes]
"""Method, target, body."""

LIMITS = ServerLimits(max_body_bytes=4096)


class Clock:
    """The part of a loop that a timer wheel needs; time stands still."""

    def time(self) -> float:
        return 0.0

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        return None


class Wire(asyncio.Transport):
    """Where the answers go."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Recorder:
    """An application that answers everything at once."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def on_head(self, request: Request) -> bool:
        return True

    def on_refused(self, error: ApiError, request: Request | None) -> bytes:
        return b""

    def on_request(self, connection: ServerConnection, request: Request) -> None:
        self.messages.append((request.method, request.target, request.body))
        connection.respond(200, b"", b"{}")


def ours(pieces: Iterable[bytes], recorder: Recorder | None = None) -> tuple[list[Message], bytes]:
    """What our connection takes the stream for, and what it answers."""
    recorder, wire = recorder or Recorder(), Wire()
    wheel = TimerWheel(cast("asyncio.AbstractEventLoop", Clock()))
    connection = ServerConnection(ServerState(recorder, LIMITS, wheel))
    connection.connection_made(wire)
    for piece in pieces:
        if wire.is_closed:
            break
        connection.data_received(piece)
    return recorder.messages, wire.sent.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


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

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
START = st.sampled_from(
    [
        *[b"POST /v1/completions HTTP/1.1\r\n"] * 6,
        b"GET /health HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.0\r\n",
        b"POST  /v1/completions HTTP/1.1\r\n",
        b"POST /v1/ completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1 \r\n",
        b"POST /v1/completions HTTP/1.2\r\n",
        b"POST /v1/completions HTTP/1.1\n",
        b"POST\t/v1/completions\tHTTP/1.1\r\n",
        b"\r\nPOST /v1/completions HTTP/1.1\r\n",
        b"P\xd6ST /v1/completions HTTP/1.1\r\n",
    ]
)
HEADER = st.sampled_from(
    [
        b"X-Kept: 1\r\n",
        b"Connection: close\r\n",
        b"Connection: keep-alive, content-length\r\n",
        b"Content-Length: 3\r\n",
        b"content-length: 0\r\n",
        b"Content-Length: 3, 3\r\n",
        b"Content-Length:  3 \r\n",
        b"Content-Length: \t3\r\n",
        b"Content-Length: 0003\r\n",
        b"Content-Length: 3\x0b\r\n",
        b"Content-Length: -3\r\n",
        b"Content_Length: 3\r\n",
        b"Content-Length : 3\r\n",
        b" Content-Length: 3\r\n",
        b"Content-Length: 3\n",
        b"Content-Length: \xc2\xb3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"transfer-encoding:chunked\r\n",
        b"Transfer-Encoding: Chunked\r\n",
        b"Transfer-Encoding: \tchunked\r\n",
        b"Transfer-Encoding: chunked \r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked;q=1\r\n",
        b'Transfer-Encoding: "chunked"\r\n',
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\n",
        b"X: a\nTransfer-Encoding: chunked\r\n",
        b"X\x00: a\r\n",
        b": empty\r\n",
        b"no colon\r\n",
        b"Trailer: content-length\r\n",
        b"Expect: 100-continue\r\n",
    ]
)
CHUNK = st.sampled_from(
    [
        *[b"3\r\nabc\r\n"] * 4,
        b"003\r\nabc\r\n",
        b"3;ext=1\r\nabc\r\n",
        b'3;ext="\r\n"\r\nabc\r\n',
        b"3;\nabc\r\n",
        b"3 \r\nabc\r\n",
        b"3\r\nabc",
        b"3\r\nabcd\r\n",
        b"3\nabc\n",
        b"+3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b"3_0\r\nabc\r\n",
        b"10000000000000003\r\nabc\r\n",
        b"\r\nabc\r\n",
        b"-1\r\nabc\r\n",
    ]
)
END = st.sampled_from(
    [
        *[b"0\r\n\r\n"] * 4,
        b"0\r\nX: 1\r\n\r\n",
        b"0\r\nContent-Length: 9\r\n\r\n",
        b"0\n\n",
        b"0\r\n",
        b"00\r\n\r\n",
    ]
)
BODY = st.one_of(
    st.just(b""),
    st.just(b"abc"),
    st.just(b"abc" + SMUGGLED),
    st.builds(lambda chunks, end: b"".join(chunks) + end, st.lists(CHUNK, max_size=3), END),
)
PLAIN = st.binary(max_size=20).map(
    lambda body: (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
)
CHUNKED = st.lists(st.binary(min_size=1, max_size=9), max_size=4).map(
    lambda parts: (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        + b"0\r\n\r\n"
    )
)
ODD = st.builds(
    lambda start, headers, body: start + b"Host: a\r\n" + b"".join(headers) + b"\r\n" + body,
    START,
    st.lists(HEADER, max_size=3),
    BODY,
)
NASTY = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"\x00", b" ", b"\t", b":", b",", b";", b"0", b"\x0b", b"\x85", b"\xff"]
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Requests, some odd, and then a few bytes exchanged, put in, or taken out."""
    data = b"".join(draw(st.lists(st.one_of(PLAIN, CHUNKED, ODD), min_size=1, max_size=4))) + SMUGGLED
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(NASTY) + data[at + draw(st.integers(0, 2)) :]
    return data


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
