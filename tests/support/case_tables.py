"""Tables of cases that one test checks together, and what it reports of those that fail."""

from __future__ import annotations

from collections.abc import Iterable


def wrong_answers(answered: Iterable[tuple[object, object, object]]) -> dict[str, str]:
    """Compare answers with the expected ones.

    Args:
        answered: of each case what was asked, the answer that is expected, and the one that came.

    Returns:
        Number and beginning of each case whose answers differ -> both. A test asserts that it is empty.
    """
    return {
        f"{number}: {repr(asked)[:100]}": f"expected {expected!r}, not {repr(came)[:500]}"
        for number, (asked, expected, came) in enumerate(answered)
        if expected != came
    }
