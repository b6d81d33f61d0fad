"""Bounds of the engine's settings, for whoever takes them: the engine's own flags and the custom resource.

Owns the ranges, written once, so that a manifest is accepted only with values that the engine takes. Must not know
what a setting does. Types carry msgspec constraints; a range's reason stands beside it.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

MaxModelLen = Annotated[int, Meta(ge=16, le=1 << 22)]
"""Tokens. A chat template alone takes more than a few; four million is beyond every model."""
BlockSize = Annotated[int, Meta(ge=1, le=256)]
"""Tokens. Prefixes are shared in whole blocks: larger ones would share nothing."""
MaxNumSeqs = Annotated[int, Meta(ge=1, le=4096)]
"""Requests. Buffers of a step are made for this many."""
MaxNumBatchedTokens = Annotated[int, Meta(ge=16, le=1 << 20)]
"""Tokens. Buffers of a step are made for this many."""
Threads = Annotated[int, Meta(ge=1, le=1024)]

MIN_KV_CACHE_BYTES: Final = 1 << 16
MAX_KV_CACHE_BYTES: Final = 1 << 46
KvCacheBytes = Annotated[int, Meta(ge=1 << 16, le=1 << 46)]
