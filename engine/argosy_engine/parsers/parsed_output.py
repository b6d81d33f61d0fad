"""Parsed output: what a piece of generated text adds to a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ParsedCall(NamedTuple):
    """A tool call, with as much of its arguments as has been read."""

    name: str
    arguments: str
    """Arguments as the JSON text of an object. They end early where the output does, and are not valid JSON if the
    model has written something else into a call that had begun."""
    id: str = ""
    """The id that the model wrote; empty if its form has none."""


class Parsed(NamedTuple):
    """What a piece of text added to the message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()
    """Calls that began."""
    arguments: str = ""
    """What was added to the arguments of the last call before these."""


class ParsedCalls:
    """Collects the calls of one piece of text."""

    def __init__(self) -> None:
        self._calls: list[ParsedCall] = []
        self._arguments: list[str] = []
        """Parts of the last call's arguments; of a call that began earlier while `_calls` is empty."""
        self._continued = ""

    def begin(self, call: ParsedCall) -> None:
        """Add a call; what is written from now on are its arguments, after those it has."""
        self._end()
        self._calls.append(call)

    def add(self, calls: Iterable[ParsedCall]) -> None:
        """Add complete calls."""
        for call in calls:
            self.begin(call)

    def write(self, arguments: str) -> None:
        """Add to the arguments of the last call."""
        self._arguments.append(arguments)

    def take(self) -> tuple[tuple[ParsedCall, ...], str]:
        """Return the calls, and what was added to the arguments of the call before them; forget both."""
        self._end()
        calls, continued = tuple(self._calls), self._continued
        self._calls, self._continued = [], ""
        return calls, continued

    def _end(self) -> None:
        arguments, self._arguments = "".join(self._arguments), []
        if not self._calls:
            self._continued += arguments
        elif arguments:
            self._calls[-1] = self._calls[-1]._replace(arguments=self._calls[-1].arguments + arguments)
