"""Reasoning: the tokens around a think block, which a grammar must let pass before it begins."""

from __future__ import annotations

from msgspec import Struct


class Reasoning(Struct, frozen=True, array_like=True):
    """Given for prompts after which the model may think."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    is_open: bool = False
    """Whether the prompt has already opened the block."""


def reasoning_after(
    prompt: str, start: str, end: str, start_ids: list[int], end_ids: list[int]
) -> Reasoning | None:
    """What may come before the answer to a prompt; None where the prompt leaves no room for thought.

    Templates open the block for models that always think, and close an empty one when thinking is off. Only the very
    end of the prompt counts: markers in what a user wrote mean nothing.
    """
    prompt = prompt[-256:].rstrip()
    if prompt.endswith(end):
        return None
    return Reasoning(tuple(start_ids), tuple(end_ids), prompt.endswith(start))
