"""TemplateRoles: which roles a chat template renders, and whether tools and documents, found by rendering probes.

Many templates skip a message whose role they do not know, and the model answers without having read it. Such a role is
refused; `developer`, by which OpenAI's newer models call what others call `system`, becomes `system` where a template
does not know it, and `function`, the older name of what a tool returns, becomes `tool`. Tools and documents that a
template leaves out are refused as well.

Invariant: a role counts as dropped only if the template rendered probes of it, and what it made of them did not depend
on their text. A template that fails on a probe may fail on the request, too, and says why.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from argosy_engine.errors import InvalidRequest

Message = dict[str, Any]

FUNCTION_CALL_ID = "function0"
"""Id of a call by OpenAI's older `function_call`, which has none. Mistral's templates want nine letters and digits."""
_MARKS = ("argosyprobe", "Text of Another")
"""Two texts of a probe: they differ in every part, since templates may trim, cut or change what they render."""


def _tools(name: str, text: str) -> Sequence[Mapping[str, Any]]:
    parameters = {"type": "object", "properties": {name: {"type": "string", "description": text}}}
    return ({"type": "function", "function": {"name": name, "description": text, "parameters": parameters}},)


def _documents(name: str, text: str) -> Sequence[Mapping[str, Any]]:
    return ({"title": name, "text": text},)


_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {"name": "f", "description": "c", "parameters": {"type": "object", "properties": {}}},
    },
)
_DOCUMENTS = _documents("d", "e")
_NAMES = (("f", "c"), ("argosy_probe", "Text of Another"))
"""Name and text of what two probes of tools or documents have."""
_SYSTEM: Message = {"role": "system", "content": "s"}
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
_MAX_ROLES = 64
"""Roles of one request: each may take as many renderings as there are probes."""
_MAX_VALUE_CHARS = 1024
"""A template argument that is longer as JSON is not given to the probes."""


class Render(Protocol):
    """Renders messages by the template; fails in any way."""

    def __call__(
        self,
        *,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        **arguments: Any,
    ) -> str: ...


class _Given(NamedTuple):
    """What a request gives its template besides messages, on which it may depend what becomes of a message."""

    tools: bool
    documents: bool
    arguments: str
    """Template arguments as JSON text."""


class TemplateRoles:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._is_dropped = lru_cache(_KNOWN_ROLES)(self._probe)
        self._is_left_out = lru_cache(_KNOWN_ROLES)(self._probe_given)

    def check(self, has_tools: bool, has_documents: bool, arguments: Mapping[str, Any]) -> None:
        """
        Raises:
            InvalidRequest: the template would leave out the tools or the documents.
        """
        given = _given(has_tools, has_documents, arguments)
        for name, is_given, remedy in (
            (
                "tools",
                has_tools,
                "leave them out, or give the engine a template that does, by --chat-template",
            ),
            ("documents", has_documents, "put them into a message"),
        ):
            if is_given and self._is_left_out(name, given):
                raise InvalidRequest(
                    f"{name}: this model's chat template does not render {name}; {remedy}", name
                )

    def known(
        self,
        messages: list[Message],
        *,
        has_tools: bool = False,
        has_documents: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[Message]:
        """Return the messages in roles that the template renders.

        Args:
            has_tools: whether the template gets tools with them.
            has_documents: whether it gets documents.
            arguments: values of variables that it declares.

        Raises:
            InvalidRequest: the template would drop a message, or there are too many roles.
        """
        num_roles = len({message["role"] for message in messages})
        if num_roles > _MAX_ROLES:
            raise InvalidRequest(f"the messages have {num_roles} roles; at most {_MAX_ROLES}", "messages")
        given = _given(has_tools, has_documents, arguments or {})
        return [self._known(message, index, given) for index, message in enumerate(messages)]

    def _known(self, message: Message, index: int, given: _Given) -> Message:
        role: str = message["role"]
        is_first = index == 0
        if role in ("user", "assistant") or not self._is_dropped(role, is_first, given):
            return message
        if role == "developer" and not self._is_dropped("system", is_first, given):
            return {**message, "role": "system"}
        if role == "function" and not self._is_dropped("tool", is_first, given):
            return {**message, "role": "tool", "tool_call_id": FUNCTION_CALL_ID}
        where = f"messages[{index}].role"
        place = "in the first message" if is_first else "after the first message"
        remedy = "use system, user, assistant or tool"
        if not given.tools and not self._is_dropped(role, is_first, given._replace(tools=True)):
            place, remedy = "without tools", "send the tools, and no tool_choice of 'none'"
        raise InvalidRequest(
            f"{where}: this model's chat template does not render the role {role!r} {place}; {remedy}",
            param=where,
        )

    def _probe_given(self, name: str, given: _Given) -> bool:
        """Return whether the template leaves out tools, or documents."""
        values, sample = _values(given), _tools if name == "tools" else _documents
        return self._makes_no_difference(
            [{**values, "messages": messages, name: sample(*names)} for names in _NAMES]
            for messages in ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER])
        )

    def _probe(self, role: str, is_first: bool, given: _Given) -> bool:
        """Return whether the template leaves out a message of that role."""
        values = _values(given)
        probes = [
            {"role": role, "content": mark, "name": "f", "tool_call_id": "123456789"} for mark in _MARKS
        ]
        return self._makes_no_difference(
            [{**values, "messages": [*before, probe, *after]} for probe in probes]
            for before, after in (_FIRST if is_first else _LATER)
        )

    def _makes_no_difference(self, probes: Iterable[Sequence[Mapping[str, Any]]]) -> bool:
        """Return whether the template renders some of these pairs of values, and the two of each pair alike."""
        is_rendered = False
        for pair in probes:
            with contextlib.suppress(Exception):  # a template may fail in any way
                one, other = (self._render(**values) for values in pair)
                if one != other:
                    return False
                is_rendered = True
        return is_rendered


def _values(given: _Given) -> dict[str, Any]:
    """What a probe renders besides its messages."""
    arguments: dict[str, Any] = json.loads(given.arguments)
    return {
        **arguments,
        "tools": _TOOLS if given.tools else None,
        "documents": _DOCUMENTS if given.documents else None,
    }


def _given(has_tools: bool, has_documents: bool, arguments: Mapping[str, Any]) -> _Given:
    texts = {name: json.dumps(value) for name, value in arguments.items()}
    short = (f"{json.dumps(name)}: {text}" for name, text in texts.items() if len(text) <= _MAX_VALUE_CHARS)
    return _Given(has_tools, has_documents, f"{{{', '.join(sorted(short))}}}")
