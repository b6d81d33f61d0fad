"""Errors on the wire."""

from __future__ import annotations

from argosy_protocol.errors import Unavailable, no_route


def test_retry_hints_are_what_sdks_read() -> None:
    assert Unavailable("x", retry_after_s=0.25).headers() == {"retry-after": "1", "retry-after-ms": "250"}


def test_a_path_with_v1_twice_is_explained() -> None:
    assert no_route("POST", "/v1/nothing").message == "no route POST /v1/nothing"
    assert no_route("POST", "/v1/v1/messages").message.endswith("the client's base URL has /v1 twice")
