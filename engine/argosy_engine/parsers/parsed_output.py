"""Parsed output: what a piece of generated text adds to a message."""

from __future__ import annotations

from typing import NamedTuple


class ParsedCall(NamedTuple):
    """A complete tool call."""

    name: str
    arguments: str
    """Arguments as the JSON text of an object."""
    id: str = ""
    """The id that the model wrote; empty if its form has none."""


class Parsed(NamedTuple):
    """What a piece of text added to the message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()
