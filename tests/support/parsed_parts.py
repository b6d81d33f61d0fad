"""Outputs in pieces, and what the parsed pieces say together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from argosy_engine.parsers.parsed_output import Parsed, ParsedCall


def joined(parts: Sequence[Parsed]) -> Parsed:
    """Join what each piece added; arguments that go on belong to the last call before them."""
    calls: list[ParsedCall] = []
    for part in parts:
        if part.arguments:
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + part.arguments)
        calls += part.calls
    return Parsed(
        "".join(part.reasoning for part in parts), "".join(part.content for part in parts), tuple(calls)
    )


def cut(text: str, at: Iterable[int]) -> list[str]:
    """Cut a text at these places; those beyond its end count from its beginning again."""
    edges = sorted({place % max(len(text), 1) for place in at} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(edges)] or [""]


def however_cut(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with `cuts`, the places for `cut`: none, all, and some that Hypothesis draws, always the same ones."""
    for cuts in (frozenset[int](), frozenset(range(_FAR))):
        test = example(cuts=cuts)(test)
    drawn = st.frozensets(st.integers(0, 400), max_size=12)
    return settings(max_examples=4, derandomize=True, deadline=None)(given(cuts=drawn)(test))


_FAR = 2000
"""More characters than a text has whose every place is tried."""
