"""Documents that are read whole: their bounds in size and time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from argosy_fetcher.errors import TransientError, UnsupportedModel
from argosy_fetcher.sources.http import MAX_DOCUMENT_S, read_bounded


def test_a_document_has_at_most_its_limit() -> None:
    assert read_bounded([b"ab", b"", b"c"], 3, "m: the list") == b"abc"
    with pytest.raises(UnsupportedModel, match="m: the list has more than 2 bytes"):
        read_bounded([b"ab", b"", b"c"], 2, "m: the list")


def test_a_document_that_trickles_is_transient() -> None:
    now = [0.0]

    def chunks() -> Iterator[bytes]:
        while True:
            now[0] += 29
            yield b"x"

    with pytest.raises(TransientError, match="m: the list took longer than 120 s"):
        read_bounded(chunks(), 1 << 20, "m: the list", lambda: now[0])
    assert now[0] <= MAX_DOCUMENT_S + 29
