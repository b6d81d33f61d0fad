"""What a prompt is to engines that only play one: its blocks are the router's own chunks, a token is four bytes."""

from __future__ import annotations

from argosy_protocol.chunks import chain_seed, chunk_hashes, chunk_offsets
from argosy_protocol.prompt_view import SegmentKind
from argosy_router.replay.trace import TraceRequest

MODEL = "tiny"
BYTES_PER_TOKEN = 4
_SEED = chain_seed(MODEL)


def as_trace(prompt: str, output_tokens: int) -> TraceRequest:
    """A completion's prompt as the replay's engines take it; it arrives at time zero."""
    segments = [(SegmentKind.TEXT, prompt.encode())]
    ends = tuple(max(1, offset // BYTES_PER_TOKEN) for offset in chunk_offsets([len(segments[0][1])]))
    return TraceRequest(0.0, ends[-1], output_tokens, tuple(chunk_hashes(segments, _SEED)), ends)
