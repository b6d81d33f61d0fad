"""The hottest prefixes of an engine's prefix cache, for a new replica that computes them before it gets requests.

An engine serves them at `GET /internal/hot_prefixes?max_tokens=N` to whoever has its administrative key, as msgpack:
they are parts of its clients' prompts. Nobody but engines reads them; routers and the operator never do.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

HOT_PREFIXES_PATH: Final = "/internal/hot_prefixes"
HOT_PREFIXES_CONTENT_TYPE: Final = "application/msgpack"
MAX_TOKENS: Final = 1 << 18
"""Most tokens of all prefixes together: 1 MiB, and some ten seconds of prefill."""
MAX_PREFIXES: Final = 256
MAX_WARM_UP_TOKENS: Final = 16_384
"""Most tokens that a new replica computes: prefill of about two seconds on a mid-size GPU. The
hottest prefixes come first, so more tokens save little, and a fleet that lacks replicas waits
meanwhile (bench/router/scaling_replay.py)."""


class HotPrefix(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prefix, from the prompt's beginning to the end of a KV cache block."""

    token_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_TOKENS)]
    """Little-endian u32 array."""
    cache_salt: Annotated[str, Meta(max_length=65_536)] | None = None
    """The salt that separates the prompts of one tenant from all others, as the request had it."""
    chunk_hashes: bytes = b""
    """Hashes of the router's chunks that end within the prefix: little-endian u64 array."""
    chunk_tokens: bytes = b""
    """For each of these the number of tokens up to its end: little-endian u32 array."""


class HotPrefixReport(Struct, frozen=True, kw_only=True):
    """The hottest prefixes, hottest first."""

    model_fingerprint: str
    """Of another model the token ids would mean nothing."""
    prefixes: Annotated[tuple[HotPrefix, ...], Meta(max_length=MAX_PREFIXES)] = ()
