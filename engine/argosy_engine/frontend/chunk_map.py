"""Chunk map: where the router's chunks end in the engine's tokens, as token counts.

The router splits a request's values (`argosy_protocol.prompt_segments`) into chunks; the engine tokenises the rendered
text. The values are found in order in the text; a chunk's end becomes a character offset, and that the number of tokens
which end at or before it. What a template dropped or moved maps to the last place found. A count that is too low
misses a hint, one that is too high is a wrong hint, so all counts are rounded down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from argosy_engine.messages.core_messages import ChunkEnd
from argosy_protocol.chunk_hash import chunk_ends, chunk_hashes
from argosy_protocol.prompt_segments import Segment, SegmentKind

_SHORT_CHARS = 32
_SHORT_WINDOW_CHARS = 256
"""Maximum distance at which a short value (a role, "yes") counts as found, because it may occur by chance in other
text."""

_LITERAL = {
    SegmentKind.TEXT,
    SegmentKind.ROLE,
    SegmentKind.NAME,
    SegmentKind.REASONING,
    SegmentKind.TOOL_CALL_ID,
}
"""Kinds of segments whose bytes are text that templates copy unchanged."""


def map_chunks(
    segments: Sequence[Segment], seed: int, text: str, token_ends: Sequence[int]
) -> list[ChunkEnd]:
    """Compute the chunk ends of a prompt that was rendered to `text`, from its tokens' ends in characters."""
    hashes = chunk_hashes(segments, seed)
    spans = _locate(segments, text)
    ends = []
    for chunk_hash, (index, byte_end) in zip(hashes, chunk_ends(segments), strict=True):
        start, value, is_found = spans[index]
        offset = start + (_char_count(value, byte_end) if is_found else 0)
        ends.append(ChunkEnd(chunk_hash, bisect_right(token_ends, offset)))
    return ends


def map_token_chunks(segments: Sequence[Segment], seed: int) -> list[ChunkEnd]:
    """Compute the chunk ends of a prompt given as token ids, of four bytes each."""
    hashes = chunk_hashes(segments, seed)
    return [
        ChunkEnd(chunk_hash, byte_end // 4)
        for chunk_hash, (_, byte_end) in zip(hashes, chunk_ends(segments), strict=True)
    ]


def _locate(segments: Sequence[Segment], text: str) -> list[tuple[int, bytes, bool]]:
    """Return for each segment the offset of its text (or the last place found), its bytes, and whether it was found."""
    position = 0
    spans = []
    for kind, data in segments:
        start = -1
        value = data
        if kind in _LITERAL and data:
            content = data.decode("utf-8", "replace")
            start = _find(text, content, position)
            if start < 0 and (stripped := content.strip()) and stripped != content:
                start = _find(text, stripped, position)
                value = stripped.encode("utf-8", "surrogatepass")
                content = stripped
        if start < 0:
            spans.append((position, data, False))
        else:
            spans.append((start, value, True))
            position = start + len(content)
    return spans


def _find(text: str, value: str, position: int) -> int:
    if len(value) < _SHORT_CHARS:
        return text.find(value, position, position + _SHORT_WINDOW_CHARS + len(value))
    return text.find(value, position)


def _char_count(value: bytes, byte_end: int) -> int:
    """Count the complete characters in the first `byte_end` bytes."""
    head = value[:byte_end]
    return len(head) if head.isascii() else len(head.decode("utf-8", "ignore"))
