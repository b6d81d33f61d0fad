"""What is written both in C and in Python, as this build of the router has it: in C if compiled, else `substitutes`.

Both behave alike: `argosy_protocol.chunk_hash` and `substitutes` document them, and tests compare them.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from typing import Final, Literal

from argosy_router import metric_series  # any module that is compiled

BUILD_KIND: Final[Literal["compiled", "pure"]] = (
    "compiled" if metric_series.__file__.endswith(tuple(EXTENSION_SUFFIXES)) else "pure"
)
"""A build has extension modules for all that can be compiled, or for nothing; Python prefers them to the sources."""

try:
    from argosy_router.native._hashing import chunk_hashes, chunk_tokens, first_ranked
    from argosy_router.native._table import ChunkTable
except ImportError:
    from argosy_protocol.chunk_hash import chunk_hashes
    from argosy_router.native.substitutes import ChunkTable, chunk_tokens, first_ranked  # type: ignore[assignment]

__all__ = ["BUILD_KIND", "ChunkTable", "chunk_hashes", "chunk_tokens", "first_ranked"]
