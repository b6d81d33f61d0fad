"""What of the prefixes' work is done in C, where it was built (`argosy_router.compile`); elsewhere it is Python's.

Both are the same to whoever calls them: `argosy_engine.protocol.chunks` and `prefixes.table` say what they do.
"""

from __future__ import annotations

try:
    from argosy_router.prefixes._hashing import chunk_hashes, chunk_offsets
    from argosy_router.prefixes._table import ChunkTable

    IS_NATIVE = True
except ImportError:
    from argosy_engine.protocol.chunks import chunk_hashes, chunk_offsets
    from argosy_router.prefixes.table import ChunkTable  # type: ignore[assignment]

    IS_NATIVE = False

__all__ = ["IS_NATIVE", "ChunkTable", "chunk_hashes", "chunk_offsets"]
