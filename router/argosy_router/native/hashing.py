"""Chunk hashes, token estimates of chunks, and rendezvous ranking: in C if built, else in Python."""

from __future__ import annotations

try:
    from argosy_router.native._hashing import chunk_hashes, chunk_tokens, first_ranked
except ImportError:
    from argosy_protocol.chunk_hash import chunk_hashes
    from argosy_router.native.chunk_tokens import chunk_tokens
    from argosy_router.native.ranking import first_ranked

__all__ = ["chunk_hashes", "chunk_tokens", "first_ranked"]
