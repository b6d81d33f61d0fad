"""Errors on the wire."""

from __future__ import annotations

from argosy_protocol.errors import Unavailable


def test_retry_hints_are_what_sdks_read() -> None:
    assert Unavailable("x", retry_after_s=0.25).headers() == {"retry-after": "1", "retry-after-ms": "250"}
