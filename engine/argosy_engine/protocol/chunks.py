"""Chunk hashes: the unit in which engine and router talk about what is cached.

A prompt's segments are cut into chunks of `CHUNK_BYTES`, closed early at each segment's end. Each chunk's hash
covers everything before it, so one 64-bit number names a whole prefix:

    seed = xxh3_64(len|model, len|adapter, len|adapter version, len|cache_salt)
    h_i  = xxh3_64(chunk_i, seed = h_{i-1} ^ KIND_MIX * (kind + 1))

with the model's canonical name, so that salts and adapters never share a prefix by construction. 64 bits suffice
for a hint: a collision sends a request to a replica that must compute its prompt after all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from argosy_engine.protocol.prompt_view import Segment

CHUNK_BYTES = 256
"""About 64-90 tokens of English: small enough to see a shared system prompt, large enough that an 8 KB prompt costs
32 hashes."""

_KIND_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_xxh3 = xxhash.xxh3_64_intdigest


def chain_seed(model: str, adapter: str = "", adapter_version: str = "", cache_salt: str = "") -> int:
    """Start of every chain of one model, adapter and salt. `model` is the service's canonical served name."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (model, adapter, adapter_version, cache_salt)]
    return _xxh3(b"".join(struct.pack("<I", len(part)) + part for part in parts))


def chunk_hashes(segments: Sequence[Segment], seed: int) -> list[int]:
    """The chain of one prompt: one hash per chunk, in prompt order."""
    hashes: list[int] = []
    previous = seed
    for kind, data in segments:
        mix = (_KIND_MIX * (kind + 1)) & _MASK
        if len(data) <= CHUNK_BYTES:
            previous = _xxh3(data, previous ^ mix)
            hashes.append(previous)
            continue
        for start in range(0, len(data), CHUNK_BYTES):
            previous = _xxh3(data[start : start + CHUNK_BYTES], previous ^ mix)
            hashes.append(previous)
    return hashes


def chunk_ends(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """For each chunk of `chunk_hashes`, `(index of its segment, byte offset of its end inside the segment)`."""
    ends: list[tuple[int, int]] = []
    for index, (_, data) in enumerate(segments):
        size = len(data)
        ends.extend((index, min(end, size)) for end in range(CHUNK_BYTES, size + CHUNK_BYTES, CHUNK_BYTES))
        if not size:
            ends.append((index, 0))
    return ends
