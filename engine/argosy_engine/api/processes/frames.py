"""Messages on a stream between two processes of one engine: four bytes of length, then msgpack."""

from __future__ import annotations

import asyncio
import socket

import msgspec

_LENGTH = 4
_encoder = msgspec.msgpack.Encoder()

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_stream(end: socket.socket) -> Stream:
    """Use one end of a `socket.socketpair`, which the stream owns from now on."""
    return await asyncio.open_unix_connection(sock=end)


def write_frame(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    payload = _encoder.encode(message)
    writer.write(len(payload).to_bytes(_LENGTH, "little") + payload)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None if the other process has closed the stream or ended."""
    try:
        length = await reader.readexactly(_LENGTH)
        return await reader.readexactly(int.from_bytes(length, "little"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
