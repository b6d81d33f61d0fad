"""Format of the usage files."""

# Not compiled: msgspec reads its annotations, which extension modules do not keep.

from __future__ import annotations

from msgspec import Struct


class UsageLine(Struct, frozen=True, kw_only=True):
    """One line of a usage file: an increment."""

    id: str
    """Unique among all lines of all routers."""
    router: str
    hour: str
    """Beginning of the hour in which the requests ended, as `2026-11-21T10:00:00Z`."""
    key: str
    """Name of the API key; empty if keys have no names."""
    model: str
    requests: int
    """Answers with usage."""
    estimated_requests: int
    """Streams without usage, for example because the client left: prompt tokens are estimated, sent tokens counted."""
    unmetered_requests: int
    """Other answers without usage, whose tokens are not known."""
    prompt_tokens: int
    """Includes the cached tokens."""
    cached_tokens: int
    completion_tokens: int
