"""HTTP GET requests to processes on this machine.

Owns: just enough of HTTP/1.1 for that. Must not know: what is asked.
Invariant: a request ends by its deadline, and never raises because of the other side; a failure is `NO_ANSWER`.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple
from urllib.parse import urlsplit

_LIMIT_BYTES: Final = 8 * 1024 * 1024


class Answer(NamedTuple):
    status: int
    body: bytes


NO_ANSWER: Final = Answer(0, b"")
"""Refused, reset, timed out, or not HTTP."""


async def get(url: str, *, timeout_s: float, bearer: str = "") -> Answer:
    """GET `http://HOST:PORT/PATH`."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    authorization = f"Authorization: Bearer {bearer}\r\n" if bearer else ""
    request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}Connection: close\r\n\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_LIMIT_BYTES)
            try:
                writer.write(request.encode())
                head = await reader.readuntil(b"\r\n\r\n")
                return Answer(int(head.split(b" ", 2)[1]), await _body(reader, head))
            finally:
                writer.close()
    except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError, ValueError, IndexError):
        return NO_ANSWER


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    headers = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n")[1:])
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        return body
    if b"content-length" in headers:
        return await reader.readexactly(int(headers[b"content-length"]))
    return await reader.read(_LIMIT_BYTES)
