"""Chunk hashes, by which engine and router identify cached prefixes.

A prompt's segments are split into chunks of `CHUNK_BYTES`; a segment's end always ends its last chunk. Deep inside a
long segment chunks grow with the offset: from `COARSE_BYTES` on their size doubles whenever the offset does. There,
a chunk is at most a 32nd of the prefix that it completes, and 100 KiB in a segment have 146 hashes, not 400. Each hash
covers everything before its chunk, so that one 64-bit number identifies a whole prefix:

    seed = xxh3_64(len|model, len|adapter, len|adapter version, len|cache_salt)
    h_i  = xxh3_64(chunk_i, seed = h_{i-1} ^ KIND_MIX * (kind + 1))

where model is the canonical name. By construction, prompts of different salts or adapters share no prefix. 64 bits
suffice for a hint: a collision sends a request to a replica that must compute its prompt after all.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from argosy_protocol.prompt_segments import Segment

CHUNK_BYTES = 256
"""About 64 to 90 tokens of English: small enough to detect a shared system prompt, large enough that an 8 KB prompt has
only 32 hashes."""
COARSE_BYTES = 64 * CHUNK_BYTES
"""Offset in a segment from which chunks have twice `CHUNK_BYTES`; from twice this offset four times, and so on."""

_KIND_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_xxh3 = xxhash.xxh3_64_intdigest


def chain_seed(model: str, adapter: str = "", adapter_version: str = "", cache_salt: str = "") -> int:
    """Seed of the chains of one model, adapter and salt. `model` is the service's canonical served name."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (model, adapter, adapter_version, cache_salt)]
    return _xxh3(b"".join(struct.pack("<I", len(part)) + part for part in parts))


def chunk_hashes(segments: Sequence[Segment], seed: int) -> array[int]:
    """Hash the chunks of one prompt, in prompt order, as `array("Q")`."""
    hashes: list[int] = []
    add = hashes.append
    previous = seed
    for kind, data in segments:
        mix = (_KIND_MIX * (kind + 1)) & _MASK
        size = len(data)
        if size <= CHUNK_BYTES:
            previous = _xxh3(data, previous ^ mix)
            add(previous)
            continue
        start, step, until = 0, CHUNK_BYTES, COARSE_BYTES
        while start < size:
            for begin in range(start, min(size, until), step):
                previous = _xxh3(data[begin : begin + step], previous ^ mix)
                add(previous)
            start, step, until = until, step * 2, until * 2
    return array("Q", hashes)


def chunk_offsets(sizes: Iterable[int]) -> list[int]:
    """For each chunk of `chunk_hashes`, the prompt bytes up to and including it. `sizes` are those of the segments."""
    offsets: list[int] = []
    base = 0
    for size in sizes:
        if size > CHUNK_BYTES:
            offsets.extend(base + end for end in _inner_ends(size))
        base += size
        offsets.append(base)
    return offsets


def chunk_ends(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """For each chunk of `chunk_hashes`, `(index of its segment, byte offset of its end inside the segment)`."""
    ends: list[tuple[int, int]] = []
    for index, (_, data) in enumerate(segments):
        size = len(data)
        ends.extend((index, end) for end in _inner_ends(size))
        ends.append((index, size))
    return ends


def _inner_ends(size: int) -> Iterator[int]:
    """Ends of a segment's chunks except the last."""
    start, step, until = 0, CHUNK_BYTES, COARSE_BYTES
    while start < size:
        yield from range(start + step, min(size, until + 1), step)
        start, step, until = until, step * 2, until * 2
