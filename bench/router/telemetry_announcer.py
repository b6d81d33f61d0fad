"""Announcer: the engine's side of the telemetry stream, for mock engines.

Owns the set of resident chunks and the connected routers. Must not know requests or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from prompts import MODEL

from argosy_protocol.telemetry import (
    Frame,
    Hello,
    Load,
    Removed,
    Stored,
    encode_frame,
    pack_u32,
    pack_u64,
    snapshot_of,
)

LOAD_INTERVAL_S = 0.1
"""A busy engine reports equally often."""


class Announcer:
    """Telemetry of one engine. `epoch` identifies this run of the engine."""

    def __init__(
        self, epoch: str, load: Callable[[], Load], *, kv_cache_tokens: int, max_num_seqs: int
    ) -> None:
        self._hello = Hello(
            epoch=epoch,
            model=MODEL,
            model_fingerprint="bench",
            block_size=16,
            max_model_len=kv_cache_tokens,
            max_num_seqs=max_num_seqs,
            kv_cache_tokens=kv_cache_tokens,
        )
        self._load = load
        self._resident: dict[int, int] = {}
        """Maps resident chunks to the number of prompt tokens up to their end."""
        self._readers: set[asyncio.WriteTransport] = set()

    def greet(self, reader: asyncio.WriteTransport) -> None:
        """Add a router: send it a snapshot, and all later frames."""
        for frame in (self._hello, *snapshot_of(self._resident), self._load()):
            reader.write(encode_frame(frame))
        self._readers.add(reader)

    def leave(self, reader: asyncio.WriteTransport) -> None:
        self._readers.discard(reader)

    def announce(self, stored: Sequence[int], tokens: Sequence[int], removed: Sequence[int] = ()) -> None:
        """Announce chunks that were stored, with the prompt tokens up to their ends, and chunks that were evicted."""
        fresh = {chunk: end for chunk, end in zip(stored, tokens, strict=True) if chunk not in self._resident}
        if fresh:
            self._resident |= fresh
            self._send(Stored(hashes=pack_u64(list(fresh)), tokens=pack_u32(list(fresh.values()))))
        if removed:
            for chunk in removed:
                del self._resident[chunk]
            self._send(Removed(hashes=pack_u64(removed)))

    async def report_load(self) -> None:
        """Report the load periodically until cancelled."""
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            self._send(self._load())

    def _send(self, frame: Frame) -> None:
        data = encode_frame(frame)
        for reader in self._readers:
            reader.write(data)
