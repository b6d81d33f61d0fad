"""HTTP responses of replicas: what the router accepts and refuses, and that no byte reaches another client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from argosy_router.config import UpstreamLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.messages import Headers
from argosy_router.http.upstream import UpstreamConnection, UpstreamError

from .fake_engine import Connection, FakeEngine, Received, completion, event
from .harness import DEADLINE_S, chat, rig

BODY = completion("mine")
OTHER = completion("another's")
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CODING = b"transfer-encoding: chunked\r\n"
GOOD = OK + LENGTH + b"\r\n" + BODY
CHUNKS = b"%x\r\n%b\r\n" % (len(BODY), BODY)
LAST = b"0\r\n\r\n"
CHUNKED = OK + CODING + b"\r\n" + CHUNKS + LAST
POISON = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nPOISON"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\n"


def coded(value: bytes) -> bytes:
    """An answer in chunks by another name."""
    return OK + b"transfer-encoding: " + value + b"\r\n\r\n" + CHUNKS + LAST


def measured(value: bytes) -> bytes:
    """An answer whose length is said in another way."""
    return OK + b"content-length: " + value + b"\r\n\r\n" + BODY


def beside(line: bytes) -> bytes:
    """A good answer with `line` among its headers."""
    return OK + line + LENGTH + b"\r\n" + BODY


def told(first: bytes) -> bytes:
    """A good answer behind another start of its first line."""
    return GOOD.replace(b"HTTP/1.1 200", first, 1)


AFTER = {
    "a second response": GOOD + POISON,
    "a second response, after chunks": CHUNKED + POISON,
    "a second response, begun": GOOD + POISON[:20],
    "a second response's first byte": GOOD + b"H",
    "a second response, up to where it takes in the next": GOOD + POISON[:-8] + b"x: ",
    "a second response, after a blank line": GOOD + b"\r\n" + POISON,
    "an interim response": GOOD + b"HTTP/1.1 100 Continue\r\n\r\n",
    "more than its length": GOOD + b"PO",
    "more than its chunks": CHUNKED + b"PO",
    "a body of a 204": b"HTTP/1.1 204 No Content\r\n\r\n" + BODY,
    "a body of a 304": b"HTTP/1.1 304 Not Modified\r\n\r\n" + BODY,
    "a response behind a 204": b"HTTP/1.1 204 No Content\r\n\r\n" + POISON,
    "bytes on a connection that ends": OK + LENGTH + b"connection: close\r\n\r\n" + BODY + POISON,
}
"""Bytes after the end."""
REFUSED = {
    "length and coding": OK + LENGTH + CODING + b"\r\n" + CHUNKS + LAST,
    "coding and length": OK + CODING + LENGTH + b"\r\n" + CHUNKS + LAST,
    "two different lengths": OK + LENGTH + b"content-length: 3\r\n\r\n" + BODY,
    "two equal lengths": OK + LENGTH + LENGTH + b"\r\n" + BODY,
    "length list": measured(b"%d, %d" % (len(BODY), len(BODY))),
    "two numbers in a length": measured(b"1 2"),
    "signed length": measured(b"+%d" % len(BODY)),
    "negative length": measured(b"-1"),
    "underscore in length": measured(b"1_0"),
    "hex length": measured(b"0x5"),
    "empty length": measured(b""),
    "length beyond 64 bits": measured(b"9" * 30),
    "a coding that only resembles": coded(b"xchunked"),
    "a coding before chunked": coded(b"gzip, chunked"),
    "a coding after chunked": coded(b"chunked, gzip"),
    "another coding": coded(b"gzip"),
    "identity": coded(b"identity"),
    "quoted coding": coded(b'"chunked"'),
    "coding behind a vertical tab": coded(b"\x0bchunked"),
    "empty coding": coded(b""),
    "coding twice": OK + CODING + CODING + b"\r\n" + CHUNKS + LAST,
    "coding of HTTP/1.0": b"HTTP/1.0 200 OK\r\n" + CODING + b"\r\n" + CHUNKS + LAST,
    "chunk size with a sign": OK + CODING + b"\r\n-1\r\nx\r\n" + LAST,
    "chunk size with 0x": OK + CODING + b"\r\n0x1\r\nx\r\n" + LAST,
    "chunk size with a space": OK + CODING + b"\r\n1 \r\nx\r\n" + LAST,
    "chunk size of nothing": OK + CODING + b"\r\n\r\nx\r\n" + LAST,
    "chunk size beyond 64 bits": OK + CODING + b"\r\n10000000000000001\r\nx\r\n" + LAST,
    "chunk longer than its size": OK + CODING + b"\r\n1\r\nPOISON\r\n" + LAST,
    "bare LF after a chunk size": OK + CODING + b"\r\n1\nx\r\n" + LAST,
    "bare LF in a chunk extension": OK + CODING + b"\r\n1;a\nx\r\n" + LAST,
    "bare LF after the last chunk": OK + CODING + b"\r\n" + CHUNKS + b"0\n\n",
    "length among the trailers": OK + CODING + b"\r\n" + CHUNKS + b"0\r\ncontent-length: 5\r\n\r\n",
    "bare LF line ends": GOOD.replace(b"\r\n", b"\n"),
    "bare LF after the status line": GOOD.replace(b"\r\n", b"\n", 1),
    "folded header": beside(b"x-a: b\r\n c\r\n"),
    "NUL in a header": beside(b"x-a: b\0c\r\n"),
    "bare CR in a header": beside(b"x-a: b\rcontent-length: 5\r\n"),
    "space before a colon": OK + b"content-length : %d\r\n\r\n" % len(BODY) + BODY,
    "header without a colon": beside(b"x-a\r\n"),
    "header without a name": beside(b": a\r\n"),
    "space before the first header": GOOD.replace(b"\r\n", b"\r\n ", 1),
    "HTTP/0.9 in name": told(b"HTTP/0.9 200"),
    "HTTP/0.9": BODY,
    "HTTP/1.2": told(b"HTTP/1.2 200"),
    "HTTP/1.10": told(b"HTTP/1.10 200"),
    "HTTP/2.0": told(b"HTTP/2.0 200"),
    "lower-case protocol": told(b"http/1.1 200"),
    "space before the status line": b" " + GOOD,
    "status of two digits": told(b"HTTP/1.1 20"),
    "status of four digits": told(b"HTTP/1.1 2000"),
    "status 000": told(b"HTTP/1.1 000"),
    "status 099": told(b"HTTP/1.1 099") + POISON,
    "status 600": told(b"HTTP/1.1 600"),
    "status 999": told(b"HTTP/1.1 999"),
    "bare CR in the reason": GOOD.replace(b"OK", b"O\rK", 1),
    "a protocol switch": SWITCH + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + POISON,
    "a protocol switch that names no protocol": SWITCH + b"\r\n" + GOOD,
    "a body of an interim response": b"HTTP/1.1 100 Continue\r\n" + LENGTH + b"\r\n" + POISON[: len(BODY)],
    "chunks of an interim response": b"HTTP/1.1 103 Early Hints\r\n" + CODING + b"\r\n" + GOOD,
    "length of a 204": b"HTTP/1.1 204 No Content\r\n" + LENGTH + b"\r\n",
    "length of a 304": b"HTTP/1.1 304 Not Modified\r\n" + LENGTH + b"\r\n",
    "coding of a 204": b"HTTP/1.1 204 No Content\r\n" + CODING + b"\r\n",
    "many headers": beside(b"x-a: b\r\n" * 10_000),
    "trailers without an end": OK + CODING + b"\r\n" + CHUNKS + b"0\r\n" + b"x-a: b\r\n" * 10_000,
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00",
}
ENDLESS = {
    "a header": OK + b"x-a: " + b"a" * 70_000,
    "a header's name": OK + b"a" * 70_000,
    "a reason": b"HTTP/1.1 200 " + b"a" * 70_000,
}
REASONS = {
    "version": (told(b"HTTP/2.0 200"), "HTTP/2.0 is not supported"),
    "status": (told(b"HTTP/1.1 099"), "status 99 cannot be forwarded"),
    "a protocol switch": (REFUSED["a protocol switch"], "status 101 cannot be forwarded"),
    "llhttp's": (REFUSED["two equal lengths"], "Duplicate Content-Length"),
    "bytes after the end": (AFTER["more than its length"], "bytes after the response"),
    "size": (ENDLESS["a header"], "response headers are too large"),
}
"""What the log says of it."""
ANSWERED = {
    "a length": (GOOD, BODY),
    "chunks": (CHUNKED, BODY),
    "chunks in capitals": (coded(b"CHUNKED"), BODY),
    "chunk extensions": (CHUNKED.replace(b"\r\n{", b";a=b\r\n{", 1).replace(LAST, b"0;a\r\n\r\n"), BODY),
    "trailers": (CHUNKED[:-2] + b"x-trailer: a\r\n\r\n", BODY),
    "no body": (OK + b"content-length: 0\r\n\r\n", b""),
    "no chunks": (OK + CODING + b"\r\n" + LAST, b""),
    "no reason": (GOOD.replace(b" OK", b"", 1), BODY),
    "any reason": (GOOD.replace(b"OK", b"\x00\x01\xff", 1), BODY),
    "a blank line before it": (b"\r\n" + GOOD, BODY),
    "interim responses before it": (
        b"HTTP/1.1 100 Continue\r\nx-early: a\r\n\r\nHTTP/1.1 103 Early Hints\r\nx-early: b\r\n\r\n" + GOOD,
        BODY,
    ),
    "HTTP/1.0 with keep-alive": (
        told(b"HTTP/1.0 200").replace(LENGTH, LENGTH + b"connection: keep-alive\r\n"),
        BODY,
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "204 with a length of zero": (b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n", b""),
    "an upgrade offered": (beside(b"upgrade: h2c\r\nconnection: upgrade\r\n"), BODY),
}
ENDING = {
    "HTTP/1.0": told(b"HTTP/1.0 200"),
    "connection: close": OK + LENGTH + b"connection: close\r\n\r\n" + BODY,
    "chunks and connection: close": OK + CODING + b"connection: close\r\n\r\n" + CHUNKS + LAST,
}
"""Whole answers on a connection that is not kept."""
UNTIL_CLOSED = {
    "no length": OK + b"\r\n" + BODY,
    "no length but keep-alive": OK + b"connection: keep-alive\r\n\r\n" + BODY,
    "no length, HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    "interim response, no length": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\n" + BODY,
}
CUT_OFF = {
    "before the head's end": GOOD[:40],
    "in a body with a length": GOOD[:-1],
    "in a chunk": (OK + CODING + b"\r\n" + CHUNKS)[:-5],
    "before the last chunk": OK + CODING + b"\r\n" + CHUNKS,
    "in the last chunk": CHUNKED[:-2],
    "after an interim response": b"HTTP/1.1 100 Continue\r\n\r\n",
}


@dataclass
class Teller:
    """A replica that answers the first request with `data`, and all others properly."""

    data: bytes
    closes: bool = False
    """Whether it ends the connection then."""
    connections: list[Connection] = field(default_factory=list)
    """Of each request."""

    async def __call__(self, connection: Connection, _: Received) -> None:
        self.connections.append(connection)
        if len(self.connections) > 1:
            connection.answer(200, OTHER)
            return
        connection.send(self.data)
        if self.closes:
            connection.writer.write_eof()
            await connection.gone()

    @property
    def is_reused(self) -> bool:
        """Whether the second request came over the connection of the first."""
        return self.connections[0] is self.connections[1]


ON_SOCKETS = {
    name: (REFUSED | AFTER | ENDLESS)[name]
    for name in (
        "length and coding",
        "chunk longer than its size",
        "a second response",
        "a protocol switch",
        "a header",
    )
}
"""One of each kind: two framings, a chunk, bytes after the end, a status, and a size."""


@pytest.mark.parametrize("data", ON_SOCKETS.values(), ids=ON_SOCKETS.keys())
async def test_ambiguous_responses_are_refused(data: bytes) -> None:
    teller = Teller(data)
    async with rig([FakeEngine(script=teller)]) as r:
        first = await r.chat()
        assert first.status_code == 502
        assert r.metric('upstream_failures_total{model="tiny",reason="malformed",replica="r0"}') == 1
        assert (await r.chat()).content == OTHER
        assert not teller.is_reused
        await r.until(teller.connections[0].writer.is_closing)


@pytest.mark.parametrize(("data", "reason"), REASONS.values(), ids=REASONS.keys())
async def test_the_log_says_why_a_response_is_refused(
    data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="argosy_router")
    async with rig([FakeEngine(script=Teller(data))]) as r:
        assert (await r.chat()).status_code == 502
    assert f"replica r0 failed a request: malformed ({reason})" in caplog.text


KEPT = {
    name: ANSWERED[name]
    for name in ("a length", "trailers", "interim responses before it", "204", "an upgrade offered")
}


@pytest.mark.parametrize(("data", "body"), KEPT.values(), ids=KEPT.keys())
async def test_unambiguous_responses_are_answered_and_their_connection_kept(data: bytes, body: bytes) -> None:
    teller = Teller(data)
    async with rig([FakeEngine(script=teller)]) as r:
        first = await r.chat()
        assert (first.status_code, first.content) == (204 if b" 204 " in data else 200, body)
        assert not {"x-early", "x-trailer", "upgrade"} & set(first.headers)
        assert (await r.chat()).content == OTHER
        assert teller.is_reused


@pytest.mark.parametrize("data", ENDING.values(), ids=ENDING.keys())
async def test_a_connection_that_is_to_end_is_not_used_again(data: bytes) -> None:
    teller = Teller(data)
    async with rig([FakeEngine(script=teller)]) as r:
        assert (await r.chat()).content == BODY
        assert (await r.chat()).content == OTHER
        assert not teller.is_reused


@pytest.mark.parametrize("data", UNTIL_CLOSED.values(), ids=UNTIL_CLOSED.keys())
async def test_a_response_of_unknown_length_ends_with_its_connection(data: bytes) -> None:
    teller = Teller(data, closes=True)
    async with rig([FakeEngine(script=teller)]) as r:
        first = await r.chat()
        assert (first.status_code, first.content) == (200, BODY)
        assert (await r.chat()).content == OTHER
        assert not teller.is_reused


@pytest.mark.parametrize("data", CUT_OFF.values(), ids=CUT_OFF.keys())
async def test_a_response_that_is_cut_off_is_no_answer(data: bytes) -> None:
    teller = Teller(data, closes=True)
    async with rig([FakeEngine(script=teller)]) as r:
        assert (await r.chat()).status_code == 502
        assert r.metric('upstream_failures_total{model="tiny",reason="reset",replica="r0"}') == 1


async def test_an_unsolicited_response_closes_its_connection() -> None:
    teller = Teller(GOOD)
    async with rig([FakeEngine(script=teller)]) as r:
        assert (await r.chat()).content == BODY
        pool = r.replica(0).pool
        await r.until(lambda: pool.idle == 1)
        teller.connections[0].send(POISON)
        await r.until(lambda: pool.idle == 0)
        assert (await r.chat()).content == OTHER
        assert not teller.is_reused


async def test_a_stream_whose_framing_breaks_ends_with_an_error() -> None:
    async def tell(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.writer.drain()
        await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
        connection.send(b"0x6\r\nPOISON\r\n")
        await connection.gone()

    has_begun = asyncio.Event()
    async with (
        rig([FakeEngine(script=tell)]) as r,
        r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer,
    ):
        text = b""
        async for piece in answer.aiter_raw():
            text += piece
            has_begun.set()
        assert text.startswith(event("hel"))
        assert b'"error"' in text
        assert b"POISON" not in text
        assert r.metric('upstream_failures_total{model="tiny",reason="malformed",replica="r0"}') == 1


# however the bytes arrive

LONG = 1000
"""Bytes from which on a response is not cut everywhere."""


class Wire:
    """A connection's transport, and the sender of the request."""

    def __init__(self, wheel: TimerWheel) -> None:
        self.body = b""
        self.error: UpstreamError | None = None
        self.answers = 0
        self.is_idle = False
        self.connection = UpstreamConnection(
            UpstreamLimits(), wheel, on_idle=self._on_idle, on_closed=lambda _: None
        )
        self.connection.connection_made(self)  # type: ignore[arg-type]
        self.connection.send(self, b"", 10.0)

    def _on_idle(self, _: UpstreamConnection) -> None:
        self.is_idle = True

    def receive(self, *pieces: bytes) -> Wire:
        for piece in pieces:
            if not self.connection.is_closed:
                self.connection.data_received(piece)
        return self

    # the sink

    def on_response(self, status: int, headers: Headers) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.answers += 1

    def on_failed(self, error: UpstreamError) -> None:
        self.error = error

    # the transport

    def write(self, data: bytes) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


def cuts(data: bytes) -> Iterator[tuple[bytes, ...]]:
    """`data` in one piece, in two, everywhere, and byte by byte. A long one: in one, and in pieces of `LONG` bytes."""
    yield (data,)
    if len(data) >= LONG:
        yield tuple(data[at : at + LONG] for at in range(0, len(data), LONG))
        return
    for at in range(1, len(data)):
        yield data[:at], data[at:]
    yield tuple(data[at : at + 1] for at in range(len(data)))


def first_wrong(
    corpus: dict[str, bytes], is_right: Callable[[str, Wire], bool]
) -> dict[str, tuple[tuple[bytes, ...], dict[str, Any]]]:
    """The first cut of each response of a corpus that is not received rightly, and what it was received as."""
    wrong, loop = {}, asyncio.get_running_loop()
    for name, data in corpus.items():
        for pieces in cuts(data):
            wire = Wire(TimerWheel(loop)).receive(*pieces)  # of one wheel, many would fail in turns
            if not is_right(name, wire):
                wrong[name] = (pieces, vars(wire))
                break
    return wrong


async def test_a_refused_response_is_refused_however_it_is_cut() -> None:
    def is_refused(_: str, wire: Wire) -> bool:
        reason = wire.error and wire.error.reason
        return (reason, wire.connection.is_closed, wire.answers, wire.is_idle) == (
            "malformed",
            True,
            0,
            False,
        )

    assert first_wrong(REFUSED | ENDLESS, is_refused) == {}


async def test_a_response_is_the_same_however_it_is_cut() -> None:
    def is_answered(name: str, wire: Wire) -> bool:
        return (wire.error, wire.body, wire.answers, wire.is_idle) == (None, ANSWERED[name][1], 1, True)

    assert first_wrong({name: data for name, (data, _) in ANSWERED.items()}, is_answered) == {}


async def test_bytes_after_a_response_are_never_part_of_one() -> None:
    def is_apart(_: str, wire: Wire) -> bool:
        ends = (wire.error is not None) + wire.answers
        return wire.connection.is_closed and ends == 1 and BODY.startswith(wire.body)

    assert first_wrong(AFTER, is_apart) == {}


async def test_a_response_with_bytes_after_it_in_the_same_piece_is_refused() -> None:
    wheel = TimerWheel(asyncio.get_running_loop())
    wires = {name: Wire(wheel).receive(data) for name, data in AFTER.items()}
    while wheel.turns.are_waiting:  # noqa: ASYNC110 - a turn ends with its time, which a busy machine takes
        await asyncio.sleep(0)
    reasons = {name: wire.error and wire.error.reason for name, wire in wires.items()}
    assert reasons == dict.fromkeys(AFTER, "malformed")
    assert [name for name, wire in wires.items() if wire.answers or wire.is_idle] == []
