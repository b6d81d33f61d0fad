"""Forward bytes in both directions without parsing: the cost of the kernel and uvloop in any one-hop proxy.

    python bench/router/tcp_passthrough.py PORT ENGINE_PORT [ENGINE_PORT ...]

Each client connection gets its own connection to an engine, in turn. This is a lower bound for any router that parses
requests, chooses a replica and accounts for them; the difference is the router's own cost.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import uvloop


class End(asyncio.Protocol):
    """One end of a pair of connections. It forwards what it receives to its peer."""

    def __init__(self) -> None:
        self.peer: asyncio.Transport | None = None
        self.early = b""
        """Data received before the peer was connected."""

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
    """A client's end, which opens a connection to an engine."""

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
