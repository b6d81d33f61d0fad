"""Quantities of bytes."""

from __future__ import annotations

import pytest

from argosy_resource.schema_types import quantity_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        (2**26, 2**26),
        ("64Mi", 2**26),
        ("2G", 2 * 10**9),
        ("3Ti", 3 * 2**40),
        ("1.5Ki", 1536),
        ("2500m", 2),
    ],
)
def test_quantity_bytes(text: int | str, count: int) -> None:
    assert quantity_bytes(text) == count


@pytest.mark.parametrize("text", ["", "Mi", "1Xi", "-1", "1.5.1Gi"])
def test_not_a_quantity_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity_bytes(text)
