"""TemplateRoles: which roles a chat template renders, found by rendering probes.

Many templates skip a message whose role they do not know, and the model answers without having read it. Such a role is
refused; `developer`, by which OpenAI's newer models call what others call `system`, becomes `system` where a template
does not know it.

Invariant: a role counts as dropped only if the template rendered a probe of it without its text. A template that fails
on a probe may fail on the request, too, and says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from argosy_engine.errors import InvalidRequest

Message = dict[str, Any]

_MARK = "argosyprobe"
"""Text of a probe: one word, so that templates that trim or quote keep it."""
_USER: Message = {"role": "user", "content": "a"}
_ANSWER: Message = {"role": "assistant", "content": "b"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {}}},
    ],
}
_FIRST: Sequence[tuple[list[Message], list[Message]]] = (([], [_USER]), ([], []))
_LATER: Sequence[tuple[list[Message], list[Message]]] = (
    ([_USER], []),
    ([_USER, _ANSWER], [_USER]),
    ([_USER, _ANSWER], []),
    ([_USER], [_USER]),
    ([_USER, _CALL], []),
)
"""Messages before and after the probe."""
_KNOWN_ROLES = 256
"""Number of answers kept; clients choose the names of roles."""


class TemplateRoles:
    """
    Args:
        render: renders messages by the template; fails in any way.
    """

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render
        self._is_dropped = lru_cache(_KNOWN_ROLES)(self._probe)

    def known(self, messages: list[Message]) -> list[Message]:
        """Return the messages in roles that the template renders.

        Raises:
            InvalidRequest: the template would drop a message.
        """
        return [self._known(message, index) for index, message in enumerate(messages)]

    def _known(self, message: Message, index: int) -> Message:
        role: str = message["role"]
        if role in ("user", "assistant") or not self._is_dropped(role, index == 0):
            return message
        if role == "developer" and not self._is_dropped("system", index == 0):
            return {**message, "role": "system"}
        where = f"messages[{index}].role"
        place = "in the first message" if index == 0 else "after the first message"
        raise InvalidRequest(
            f"{where}: this model's chat template does not render the role {role!r} {place}; "
            "use system, user, assistant or tool",
            param=where,
        )

    def _probe(self, role: str, is_first: bool) -> bool:
        """Return whether the template leaves out a message of that role."""
        probe: Message = {"role": role, "content": _MARK, "name": "f", "tool_call_id": "123456789"}
        rendered: list[str] = []
        for before, after in _FIRST if is_first else _LATER:
            with contextlib.suppress(Exception):  # a template may fail in any way
                rendered.append(self._render([*before, probe, *after]))
        return bool(rendered) and not any(_MARK in text for text in rendered)
