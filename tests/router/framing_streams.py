"""Random streams of requests, some odd, with a few bytes changed."""

from __future__ import annotations

from hypothesis import strategies as st

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
