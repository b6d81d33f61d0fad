"""What the pieces of a parsed output say together."""

from __future__ import annotations

from collections.abc import Sequence

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
