"""Reasoning: the tokens that open and close a think block, which may precede a structured output."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Reasoning(Struct, frozen=True, array_like=True):
    """Markers of a think block, for a prompt after which the model may think."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    is_open: bool = False
    """Whether the prompt has already opened the block."""


def last_index(token_ids: Sequence[int], mark: Sequence[int]) -> int:
    """Return the index at which a mark begins for the last time; -1 if it does not occur."""
    size, mark = len(mark), list(mark)
    starts = range(len(token_ids) - size, -1, -1)
    return next((i for i in starts if token_ids[i] == mark[0] and list(token_ids[i : i + size]) == mark), -1)


def reasoning_after(
    prompt: str, start: str, end: str, start_ids: list[int], end_ids: list[int]
) -> Reasoning | None:
    """Return the markers of the think block that may follow a prompt, or None if the prompt rules it out.

    Templates open the block for models that always think, and close an empty block if thinking is off. Only the end of
    the prompt is examined, so that markers in a user's text have no effect.
    """
    prompt = prompt[-256:].rstrip()
    if prompt.endswith(end):
        return None
    return Reasoning(tuple(start_ids), tuple(end_ids), prompt.endswith(start))


def reasoning_in(
    message: str, start: str, end: str, start_ids: list[int], end_ids: list[int]
) -> Reasoning | None:
    """Return the markers of the think block that a message, which is to be continued, has begun and not closed; None
    otherwise, because the model does not think in the middle of an answer."""
    if not message.lstrip().startswith(start) or end in message:
        return None
    return Reasoning(tuple(start_ids), tuple(end_ids), is_open=True)
