"""Decisions have numbers, unique over all pages of docs/decisions, and a date."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = sorted((Path(__file__).parent.parent / "docs" / "decisions").glob("*.md"))
_HEADING = re.compile(r"^### .*$", re.MULTILINE)
_DECISION = re.compile(r"^### (\d+)\. \S.*\n\n\*\d{4}-\d\d-\d\d[.; ]", re.MULTILINE)


def test_every_decision_has_a_number_of_its_own_and_a_date() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    numbers = [int(number) for number in _DECISION.findall(text)]
    assert len(numbers) == len(_HEADING.findall(text)), (
        "a heading has no number, or its text does not begin with a date"
    )
    assert sorted(numbers) == list(range(1, len(numbers) + 1)), "a number is missing, or given twice"
