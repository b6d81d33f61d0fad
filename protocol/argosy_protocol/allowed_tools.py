"""`allowed_tools`: the tool choice that allows some of a request's tools only.

The others are left out of the request, and so of the prompt; what remains is the choice `auto` or `required`.

Must not know: which API the request is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from argosy_protocol.errors import BadRequest

ALLOWED_TOOLS = "allowed_tools"
"""The type of such a choice."""


def function_name(tool: object) -> object:
    """The name of a tool as chats describe it; None if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def allowed(
    tools: Sequence[dict[str, Any]], mode: object, names: Sequence[object], where: str
) -> tuple[str, list[dict[str, Any]]]:
    """Return the remaining choice, and the tools that it allows.

    Args:
        tools: the request's, as chats describe them.
        mode: as the client sent it.
        names: the values that the client sent as names.
        where: the field with `mode` and `tools`, for errors.

    Raises:
        BadRequest: the mode is neither `auto` nor `required`, or a name is none of the tools'.
    """
    if mode not in ("auto", "required"):
        raise BadRequest(f"{where}.mode must be auto or required", param=f"{where}.mode")
    named_by = [function_name(tool) for tool in tools]
    allowed_names = {name for name in names if isinstance(name, str)}
    known = {name for name in named_by if isinstance(name, str)}
    if not names or not all(isinstance(name, str) for name in names) or not allowed_names <= known:
        raise BadRequest(f"{where}.tools must name some of tools", param=f"{where}.tools")
    return str(mode), [
        tool
        for tool, name in zip(tools, named_by, strict=True)
        if isinstance(name, str) and name in allowed_names
    ]
