"""CallIds: the ids of the tool calls of one choice, of which no two are equal.

Some models write the ids themselves, and repeat them. A client refers to a call by its id alone.
"""

from __future__ import annotations

from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser


class CallIds:
    """
    Args:
        choice: index of the choice.
    """

    def __init__(self, tool_parser: ToolParser, request_id: str, choice: int) -> None:
        self._tool_parser = tool_parser
        self._request_id = request_id
        self._choice = choice
        self._taken: set[str] = set()
        self._fresh = 0
        """Number from which on ids were not tried instead of repeated ones."""

    def add(self, number: int, call: ParsedCall) -> str:
        """Return the id of the choice's next call: the model's if it wrote one that no call before has.

        It is a function of the calls so far and the request's id, so that a resumed stream repeats it.
        """
        call_id = self._tool_parser.call_id(self._request_id, self._choice, number, call)
        if call_id in self._taken:
            call_id = self._other(number, call._replace(id="")) or call_id
        self._taken.add(call_id)
        return call_id

    def _other(self, number: int, call: ParsedCall) -> str | None:
        """Return an id that is not taken; None if the parser's ids do not depend on the number."""
        self._fresh = max(self._fresh, number)
        for _ in range(len(self._taken) + 1):
            call_id = self._tool_parser.call_id(self._request_id, self._choice, self._fresh, call)
            self._fresh += 1
            if call_id not in self._taken:
                return call_id
        return None
