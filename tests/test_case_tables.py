"""What tests report that check a table of cases together."""

from __future__ import annotations

from case_tables import wrong_answers
from manifests_table import Case, wrongly_answered


def test_every_wrong_answer_is_reported() -> None:
    cases = [("a", 400, 400), ("b", 400, 200), ("b", None, "x"), ("c" * 200, 1, 2)]
    assert wrong_answers(cases) == {
        "1: 'b'": "expected 400, not 200",
        "2: 'b'": "expected None, not 'x'",
        f"3: '{'c' * 99}": "expected 1, not 2",
    }


def test_every_manifest_that_is_answered_otherwise_is_reported() -> None:
    names = ("good", "good but refused", "bad", "bad for another reason", "bad but accepted")
    cases = [Case(name, "", "why" if name.startswith("bad") else None) for name in names]
    messages = dict(zip(names, (None, "no", "that is why", "no", None), strict=True))
    assert wrongly_answered(cases, messages) == {
        "good but refused": ("", "no"),
        "bad for another reason": ("why", "no"),
        "bad but accepted": ("why", ""),
    }
