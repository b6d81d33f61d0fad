"""Ranges of the engine's settings, shared by the engine's flags and the custom resource.

Owns: the ranges, so that a manifest is accepted only with values that the engine accepts, too. Must not know: what a
setting does. Types carry msgspec constraints; the docstring of each gives the reason for its range.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

MaxModelLen = Annotated[int, Meta(ge=16, le=1 << 22)]
"""In tokens. A chat template alone takes more than a few; four million exceeds every model."""
BlockSize = Annotated[int, Meta(ge=1, le=256)]
"""In tokens. Prefixes are shared in whole blocks, so larger blocks would share hardly anything."""
MaxNumSeqs = Annotated[int, Meta(ge=1, le=4096)]
"""In requests. The buffers of a step are allocated for this many."""
MaxNumBatchedTokens = Annotated[int, Meta(ge=16, le=1 << 20)]
"""In tokens. The buffers of a step are allocated for this many."""
Threads = Annotated[int, Meta(ge=1, le=1024)]

MIN_KV_CACHE_BYTES: Final = 1 << 16
MAX_KV_CACHE_BYTES: Final = 1 << 46
KvCacheBytes = Annotated[int, Meta(ge=1 << 16, le=1 << 46)]
