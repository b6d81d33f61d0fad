"""Prompts as mock engines see them: the blocks are the router's chunks, and a token is four bytes."""

from __future__ import annotations

from argosy_protocol.chunk_hash import SegmentKind, chain_seed, chunk_hashes, chunk_offsets
from argosy_router.observability.lines import TraceRequest

MODEL = "tiny"
BYTES_PER_TOKEN = 4
_SEED = chain_seed(MODEL)


def as_trace(prompt: str, output_tokens: int) -> TraceRequest:
    """Convert a completion's prompt to a trace request for the replay's engines, arriving at time zero."""
    segments = [(SegmentKind.TEXT, prompt.encode())]
    ends = tuple(max(1, offset // BYTES_PER_TOKEN) for offset in chunk_offsets([len(segments[0][1])]))
    return TraceRequest(0.0, ends[-1], output_tokens, tuple(chunk_hashes(segments, _SEED)), ends)
