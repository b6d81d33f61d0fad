"""The format of the usage files."""

from __future__ import annotations

from msgspec import Struct


class UsageLine(Struct, frozen=True, kw_only=True):
    """One increment, as written."""

    id: str
    """Unique among all lines of all routers."""
    router: str
    hour: str
    """Beginning of the hour in which the requests ended, as `2026-11-21T10:00:00Z`."""
    key: str
    """Name of the API key; empty where keys have no names."""
    model: str
    requests: int
    """Answers with usage."""
    estimated_requests: int
    """Streams without, as when the client left: the prompt's tokens are estimated, what was sent is counted."""
    unmetered_requests: int
    """Other answers without. Their tokens are not known."""
    prompt_tokens: int
    """Cached ones included."""
    cached_tokens: int
    completion_tokens: int
