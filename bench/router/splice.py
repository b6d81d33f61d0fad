"""Forwards bytes both ways and looks at nothing: what any proxy of one hop pays the kernel and uvloop.

    python bench/router/splice.py PORT ENGINE_PORT [ENGINE_PORT ...]

Each client connection gets a connection to an engine of its own, by turns. A router that reads requests, chooses and
keeps books cannot cost less; what it costs more is its own doing.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import uvloop


class End(asyncio.Protocol):
    """One end of a pair: what it receives, its peer sends."""

    def __init__(self) -> None:
        self.peer: asyncio.Transport | None = None
        self.early = b""
        """Received before there was a peer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self.early += data
        else:
            self.peer.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peer is not None:
            self.peer.close()


class Accepted(End):
    """A client's end, which gets an engine's."""

    def __init__(self, engines: itertools.cycle[int]) -> None:
        super().__init__()
        self._engines = engines

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        engine, far = await loop.create_connection(End, "127.0.0.1", next(self._engines))
        self.peer, far.peer = engine, self.transport  # type: ignore[assignment]
        engine.write(self.early)


async def main(port: int, engines: list[int]) -> None:
    turns = itertools.cycle(engines)
    server = await asyncio.get_running_loop().create_server(lambda: Accepted(turns), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
