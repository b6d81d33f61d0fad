"""The `ChunkTable` in use: in C if built, else `prefixes.table`."""

from __future__ import annotations

try:
    from argosy_router.native._table import ChunkTable
except ImportError:
    from argosy_router.prefixes.table import ChunkTable  # type: ignore[assignment]

__all__ = ["ChunkTable"]
