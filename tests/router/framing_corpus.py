"""Requests whose framing is ambiguous or malformed, and which must be refused."""

from __future__ import annotations

import json

from .harness import chat

BODY = json.dumps(chat()).encode()

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\n"

HOST = b"Host: a\r\n"

TYPE = b"Content-Type: application/json\r\n"

LENGTH = b"Content-Length: %d\r\n" % len(BODY)

GOOD = HEAD + HOST + TYPE + LENGTH + b"\r\n" + BODY

SMUGGLED = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\nUpgrade: h2c\r\n"
"""What Java's HTTP client sends with a request until a server has answered."""

REFUSED = {
    "content-length and transfer-encoding": HEAD
    + HOST
    + TYPE
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "transfer-encoding then content-length": HEAD
    + HOST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "two different lengths": HEAD + HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + SMUGGLED,
    "two equal lengths": HEAD + HOST + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
    "length list": HEAD + HOST + b"Content-Length: 0, 0\r\n\r\n" + SMUGGLED,
    "signed length": HEAD + HOST + b"Content-Length: +5\r\n\r\nhello" + SMUGGLED,
    "underscore in length": HEAD + HOST + b"Content-Length: 1_0\r\n\r\n0123456789" + SMUGGLED,
    "absurd length": HEAD + HOST + TYPE + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
    "hex length": HEAD + HOST + b"Content-Length: 0x5\r\n\r\nhello",
    "empty length": HEAD + HOST + b"Content-Length: \r\n\r\n" + SMUGGLED,
    "unknown coding": HEAD + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "coding list": HEAD + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "identity coding": HEAD + HOST + b"Transfer-Encoding: identity\r\n\r\n" + SMUGGLED,
    "coding twice": HEAD
    + HOST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": HEAD + HOST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "NUL in a header": HEAD + HOST + b"X: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "bare CR in a header": HEAD + HOST + b"X: a\rb\r\n" + LENGTH + b"\r\n" + BODY,
    "bare LF line ends": GOOD.replace(b"\r\n", b"\n"),
    "folded header": HEAD + HOST + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "bare LF in a chunk extension": HEAD + HOST + b"Transfer-Encoding: chunked\r\n\r\n1;a\nx\r\n0\r\n\r\n",
    "negative chunk": HEAD + HOST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n",
    "chunk size with 0x": HEAD + HOST + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": HEAD
    + HOST
    + b"Transfer-Encoding: chunked\r\n\r\n10000000000000001\r\nx\r\n0\r\n\r\n",
    "chunk longer than its size": HEAD
    + HOST
    + b"Transfer-Encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n"
    + SMUGGLED,
    "bare LF after the last chunk": HEAD + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\n\n" + SMUGGLED,
    "quoted coding": HEAD + HOST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n' + SMUGGLED,
    "coding behind a vertical tab": HEAD
    + HOST
    + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "length behind a bare CR": HEAD + HOST + b"X: a\rContent-Length: 5\r\n\r\nhello" + SMUGGLED,
    "header without a colon": HEAD + HOST + b"Content-Length\r\n\r\n" + SMUGGLED,
    "header without a name": HEAD + HOST + b": 5\r\n\r\nhello",
    "space before the first header": HEAD + b" Host: a\r\n\r\n" + SMUGGLED,
    "control character in the target": b"GET /hea\x01lth HTTP/1.1\r\nHost: a\r\n\r\n",
    "two hosts": HEAD + HOST + HOST + LENGTH + b"\r\n" + BODY,
    "no host": HEAD + LENGTH + b"\r\n" + BODY,
    "CONNECT": b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n" + SMUGGLED,
    "ambiguous length with an upgrade": HEAD
    + HOST
    + OFFER
    + TYPE
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + SMUGGLED,
    "absolute target": b"GET http://b/health HTTP/1.1\r\nHost: a\r\n\r\n",
    "asterisk target": b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/1.0 with chunked": HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown expectation": HEAD + HOST + b"Expect: payment\r\n" + LENGTH + b"\r\n" + BODY,
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00",
    "lower-case method": b"post /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "unknown method": b"BREW /health HTTP/1.1\r\nHost: a\r\n\r\n",
}
