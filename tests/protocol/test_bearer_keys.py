"""Internal keys and key rings."""

from __future__ import annotations

import pytest

from argosy_protocol.headers import KeyRing, internal_key, node_key


def test_internal_keys_differ_by_service_and_need_a_real_fleet_key() -> None:
    key = b"0123456789abcdef"
    assert internal_key(key, "uid-1") != internal_key(key, "uid-2")
    assert internal_key(key, "uid-1") == internal_key(key, "uid-1")
    for bad in ((b"short", "uid"), (key, "")):
        for derive in (internal_key, node_key):
            with pytest.raises(ValueError, match="must"):
                derive(*bad)


def test_an_internal_key_is_pinned_and_tells_nothing_of_the_key_of_nodes() -> None:
    key = b"0123456789abcdef"
    assert internal_key(key, "uid-1") == "AaqpUtxdGIHBc0uoNGyB0VCMYkrsuZQaqjQjQhueYYU", (
        "another one replaces every pod"
    )
    assert len(node_key(key, "uid-1")) == 43
    assert len({internal_key(key, "uid-1"), node_key(key, "uid-1"), node_key(key, "uid-2")}) == 3


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("Bearer one", True), ("bearer two", True), ("Bearer  one ", True), ("Bearer three", False),
        ("Basic one", False), ("one", False), ("", False), (None, False), ("Bearer", False),
    ],
)  # fmt: skip
def test_key_ring(header: str | None, accepted: bool) -> None:
    assert KeyRing(["one", "two", ""]).accepts(header) is accepted
