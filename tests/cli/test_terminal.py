"""Tables on a terminal."""

from __future__ import annotations

from argosy.terminal import table


def test_a_table_has_aligned_columns() -> None:
    assert table(("A", "LONG"), [("value", "1")]) == "A      LONG\nvalue  1"


def test_what_a_cell_says_moves_no_cursor() -> None:
    assert table(("A",), [("a\x1b[2J\u009b1A\nb\u202ec",)]) == "A\na?[2J?1A?b?c"
