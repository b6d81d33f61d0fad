"""Hashing of prompts: the chunk hashes and sizes by which a request is routed.

Owns: which prompt of a batch counts, and the seed that separates services, adapters and cache salts.
Must not know: replicas, indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from argosy_protocol.chunk_hash import chain_seed
from argosy_protocol.prompt_segments import Segment, SegmentKind
from argosy_router.native.hashing import chunk_hashes

_AFFINITY_CHUNKS: Final = 4
"""The affinity hash is the hash chain up to this chunk: the role, then the first 768 bytes of the first text. Fewer
would send every prompt with the same role to one replica; more would separate prompts that share a system prompt."""


class Prompt:
    """A request's prompt as routing sees it, without its content."""

    __slots__ = (
        "affinity_hash",
        "chunk_tokens",
        "has_media",
        "hashes",
        "is_cut",
        "name",
        "segment_bytes",
        "session",
        "text_bytes",
        "token_ids",
    )

    def __init__(
        self,
        hashes: Sequence[int],
        affinity_hash: int,
        text_bytes: int,
        token_ids: int,
        session: int = 0,
        segment_bytes: Sequence[int] = (),
        chunk_tokens: Sequence[int] = (),
        name: str = "",
        *,
        has_media: bool = False,
        is_cut: bool = False,
    ) -> None:
        self.hashes = hashes
        self.affinity_hash = affinity_hash
        """Hash of the prompt's beginning, by which rendezvous hashing ranks replicas; zero if it has no chunk."""
        self.text_bytes = text_bytes
        self.token_ids = token_ids
        self.session = session
        """Hash of the session that the client declared; zero for none."""
        self.segment_bytes = segment_bytes
        """Sizes of the segments that `hashes` were made of. Their content stays in the request's body only."""
        self.chunk_tokens = chunk_tokens
        """Prompt tokens up to the end of each chunk, if known; else they are estimated from `segment_bytes`."""
        self.name = name
        """What a replica must serve to answer: the side of a canary rollout that answers, if there is one, followed by
        an adapter or alias, if not all replicas serve it. Empty for the model itself at any replica. What comes before
        that if a gateway allows some endpoints only, `CandidatePool.restricted` knows."""
        self.has_media = has_media
        """Whether it has parts that are no text, such as images, whose tokens do not follow from their bytes."""
        self.is_cut = is_cut
        """Whether the engine may cut tokens off, so that fewer are computed."""


class MeasuredPrompts(NamedTuple):
    """The prompts of one request, hashed and measured. A batch is routed by its longest prompt."""

    hashes: Sequence[int]
    """Of the longest prompt."""
    segment_bytes: Sequence[int]
    """Of the longest prompt."""
    text_bytes: int
    token_ids: int
    has_media: bool


def measure(prompts: Sequence[Sequence[Segment]], seed: int) -> MeasuredPrompts:
    """Hash and measure a request's prompts."""
    text = ids = 0
    has_media = False
    hashes: Sequence[int] = ()
    longest: Sequence[Segment] = ()
    for segments in prompts:
        chain = chunk_hashes(segments, seed)
        if len(chain) > len(hashes):
            hashes, longest = chain, segments
        for kind, data in segments:
            if kind == SegmentKind.TOKENS:
                ids += len(data) >> 2
            elif kind == SegmentKind.DIGEST:
                has_media = True
            else:
                text += len(data)
    return MeasuredPrompts(hashes, [len(data) for _, data in longest], text, ids, has_media)


class PromptHasher:
    """Hashes the prompts of one service."""

    def __init__(self, engine_name: str) -> None:
        """`engine_name` is the model name with which the service's engines seed their hashes."""
        self._engine_name = engine_name
        self._unsalted_seed = chain_seed(engine_name)

    def seed(self, adapter: str = "", cache_salt: str = "") -> int:
        """Return the seed of the chains of one adapter and salt."""
        if adapter or cache_salt:
            return chain_seed(self._engine_name, adapter, cache_salt=cache_salt)
        return self._unsalted_seed


def prompt_from(
    measured: MeasuredPrompts, session: int = 0, name: str = "", *, is_cut: bool = False
) -> Prompt:
    """Return what routing needs to know of a request's prompts, with `Prompt`'s arguments."""
    hashes = measured.hashes
    return Prompt(
        hashes,
        hashes[min(_AFFINITY_CHUNKS, len(hashes)) - 1] if hashes else 0,
        measured.text_bytes,
        measured.token_ids,
        session,
        measured.segment_bytes,
        name=name,
        has_media=measured.has_media,
        is_cut=is_cut,
    )
