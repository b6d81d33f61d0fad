"""ReasoningParser: the marks around a family's reasoning."""

from __future__ import annotations

from typing import ClassVar


class ReasoningParser:
    """Reasoning between two markers, before the answer."""

    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens within the markers, if these have other text."""
    end_before_calls: ClassVar[str | None] = None
    """What ends the reasoning before calls that a grammar requires, if it is not `end`."""
    message_ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a message of reasoning, if there may be several; their tokens are counted by these."""
    starts_open: ClassVar[bool] = False
    """Whether an output without the start marker begins with reasoning, unless the prompt has closed it."""
