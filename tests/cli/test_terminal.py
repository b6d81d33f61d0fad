"""Tables on a terminal."""

from __future__ import annotations

from argosy.terminal import table


def test_a_table_has_aligned_columns() -> None:
    assert table(("A", "LONG"), [("value", "1")]) == "A      LONG\nvalue  1"
