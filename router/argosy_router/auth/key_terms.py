"""The terms of a key, which follow the key in its line of a key file.

Owns: the names, types and bounds of terms. Must not know: requests, how terms are applied.
"""

# Not compiled: msgspec reads its annotations, which extension modules do not keep.

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from argosy_protocol.fleet import ModelName

MAX_PER_MINUTE = 1_000_000_000


class KeyTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The terms of one key. Zero means no limit."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """What logs and metrics call the key. Keys of the same name share one account, as while one replaces another."""
    models: tuple[ModelName, ...] = ()
    """Names that requests may give; none means all models."""
    requests_per_minute: Annotated[int, Meta(ge=0, le=MAX_PER_MINUTE)] = 0
    tokens_per_minute: Annotated[int, Meta(ge=0, le=MAX_PER_MINUTE)] = 0
    """Counts prompt and completion tokens together."""
    max_parallel_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Counts queued requests too, each as one, as LiteLLM does."""
    max_parallel_sequences: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Counts each choice, prompt of a batch and beam of these requests: what takes an engine's batch slots."""
    weight: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    """Share of a saturated service, relative to the other keys with queued requests for it."""
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0
    """Priority of all its requests; a lower number goes first."""
    cache: Literal["shared", "private"] = "shared"
    """Whose cached prefixes its requests may use: those of all shared keys, or those of its own name only."""
