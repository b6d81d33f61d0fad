"""ResponseTools: the tools of a Responses request as functions of a chat, and calls of them as the client expects them.

    Responses                                           chat
    ---------                                           ----
    function                                            function
    custom, whose input is a text                       function with one argument, `input`
    namespace of functions and custom tools             functions named NAMESPACE__NAME; those of `functions` by NAME
    tool_search that the client does                    function `tool_search`
    tools of OpenAI's servers                           none

Tools also come in items of the input: agents add some in the middle of a conversation. Those are history, so what
cannot be read of them is skipped; of the request's own tools it is refused.

Owns: names of functions, and what they stand for. Must not know: messages, how calls are parsed.
Invariant: no two functions have the same name, and a name is the same in each request that has the same tools in the
same order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from argosy_protocol.allowed_tools import ALLOWED_TOOLS, allowed
from argosy_protocol.errors import BadRequest
from argosy_protocol.responses import ResponseItem, ResponsesRequest, ResponseTool
from argosy_protocol.skipped_content import Skipped

CUSTOM_ARGUMENT: Final = "input"
"""The only argument of a function that stands for a custom tool."""
MAX_FUNCTIONS: Final = 512
"""Of one request: as many as a chat may have."""
MAX_TOOLS_OF_ITEMS: Final = 4096
"""Tools that are read of all items together: agents repeat them with each turn."""
MAX_NAME: Final = 64
DEFAULT_NAMESPACE: Final = "functions"
"""OpenAI's name of the namespace in which tools are that name none."""
TOOL_SEARCH: Final = "tool_search"

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")
_HASH_CHARS: Final = 8
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}

ToolKind = Literal["function", "custom", "tool_search"]


class ClientTool(NamedTuple):
    """A tool as the client calls it."""

    kind: ToolKind
    name: str
    namespace: str | None = None


class ResponseTools:
    """
    Args:
        items: the conversation, whose tools are added to those of the request.

    Raises:
        BadRequest: a tool of the request has no name, or there are too many.
    """

    def __init__(self, request: ResponsesRequest, items: Iterable[ResponseItem], skipped: Skipped) -> None:
        self._skipped = skipped
        self._described: dict[ClientTool, ResponseTool] = {}
        """In the order in which they first come; described as the last time."""
        self.paths: dict[ClientTool, str] = {}
        """Where the request has a tool."""
        for index, tool in enumerate(request.tools or ()):
            self._add_own(tool, f"tools[{index}]")
        if len(self._described) > MAX_FUNCTIONS:
            raise BadRequest(f"tools are more than {MAX_FUNCTIONS} functions", param="tools")
        self._room = MAX_TOOLS_OF_ITEMS
        for item in items:
            if item.kind in ("additional_tools", "tool_search_output"):
                for tool in self._readable(item.tools):
                    self._add_of_item(tool)
        self._names = self._named()
        self._tools = {name: tool for tool, name in self._names.items()}
        self._alike: dict[tuple[Any, Any], dict[str | None, str]] = {}
        """The functions by their tools' kind and name, then by namespace: a choice may name many."""
        for named, name in self._names.items():
            self._alike.setdefault((named.kind, named.name), {})[named.namespace] = name

    def functions(self) -> list[dict[str, Any]]:
        """Return the functions, as chats describe them."""
        return [_function(self._names[tool], tool, described) for tool, described in self._described.items()]

    def path(self, index: int) -> str | None:
        """Return where the request has the tool of which the chat has a function; None if an item has it."""
        tools = list(self._described)
        return self.paths.get(tools[index]) if index < len(tools) else None

    def called(self, name: str) -> ClientTool:
        """Return the tool that a call of a function is for; a name that is none of them is a function's."""
        return self._tools.get(name) or ClientTool("function", name)

    def name_of(self, tool: ClientTool) -> str:
        """Return the name of the function that stands for a tool, also for one that the request does not have any
        more."""
        return self._names.get(tool) or _flat_name(tool)

    def chosen(self, choice: Any) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
        """Return a chat's tool choice, and the functions that it allows.

        Raises:
            BadRequest: it is none, or names none of the tools that the model is told of.
        """
        functions = self.functions()
        if choice not in (None, "auto", "none") and not functions:
            dropped = self._skipped.dropped_tools
            why = f"; of those given, this server runs none: {dropped}" if dropped else ""
            raise BadRequest(f"tool_choice needs tools{why}", param="tool_choice")
        if isinstance(choice, dict):
            return self._chosen(choice, functions)
        if choice not in (None, "auto", "none", "required"):
            raise BadRequest(
                f"tool_choice must be none, auto, required or a function, not {choice!r}", param="tool_choice"
            )
        return choice, functions

    def _chosen(
        self, choice: dict[str, Any], functions: list[dict[str, Any]]
    ) -> tuple[str | dict[str, Any], list[dict[str, Any]]]:
        kind = choice.get("type")
        if kind in ("function", "custom"):
            name = self._found(choice)
            if name is None:
                raise BadRequest(
                    "tool_choice.name must be the name of one of tools", param="tool_choice.name"
                )
            return {"type": "function", "function": {"name": name}}, functions
        if kind == ALLOWED_TOOLS:
            named = choice.get("tools")
            tools = [tool for tool in named if isinstance(tool, dict)] if isinstance(named, list) else []
            names = [
                self._found(tool) for tool in tools if tool.get("type") in ("function", "custom", TOOL_SEARCH)
            ]
            return allowed(functions, choice.get("mode"), names, "tool_choice")
        raise BadRequest(
            f"tool_choice.type: {kind!r} is not supported, since this server runs no tools; name a function or a "
            "custom tool",
            param="tool_choice.type",
        )

    def _found(self, choice: dict[str, Any]) -> str | None:
        """Return the function that a choice means; a name without its namespace will do if only one tool has it."""
        kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
        if kind == TOOL_SEARCH:
            name = TOOL_SEARCH
        if not isinstance(name, str):
            return None
        named = self._alike.get((kind, name), {})
        if namespace is None and len(named) == 1:
            return next(iter(named.values()))
        return named.get(namespace) if isinstance(namespace, str | None) else None

    def _add_own(self, tool: ResponseTool, where: str) -> None:
        """Add a tool of the request."""
        if tool.type in ("function", "custom"):
            if tool.name is None:
                raise BadRequest(f"{where}.name is required", param=f"{where}.name")
            self._add(ClientTool(_kind(tool), tool.name), tool, where)
        elif tool.type == "namespace":
            if tool.name is None:
                raise BadRequest(f"{where}.name is required", param=f"{where}.name")
            try:
                inner = msgspec.convert(tool.tools, list[ResponseTool])
            except msgspec.ValidationError as error:
                raise BadRequest(f"{where}.tools: {error}", param=f"{where}.tools") from None
            for index, member in enumerate(inner):
                at = f"{where}.tools[{index}]"
                if member.type not in ("function", "custom") or member.name is None:
                    raise BadRequest(f"{at} must be a function or a custom tool with a name", param=at)
                self._add(ClientTool(_kind(member), member.name, tool.name), member, at)
        else:
            self._add_other(tool, where)

    def _add_of_item(self, tool: ResponseTool) -> None:
        """Add a tool of an item, as far as it can be read and there is room."""
        members: Sequence[tuple[ResponseTool, str | None]] = ((tool, None),)
        if tool.type == "namespace" and tool.name is not None:
            members = [(member, tool.name) for member in self._readable(tool.tools)]
        for member, namespace in members:
            if member.type not in ("function", "custom"):
                self._add_other(member, None)
            elif member.name is None or len(self._described) >= MAX_FUNCTIONS:
                self._skipped.add("tool")
            else:
                self._add(ClientTool(_kind(member), member.name, namespace), member, None)

    def _readable(self, tools: Any) -> list[ResponseTool]:
        """Return those of an item's tools that can be read."""
        if not isinstance(tools, list):
            self._skipped.add("tool")
            return []
        read = (self._skipped.read(tool, ResponseTool, "tool") for tool in tools[: self._room])
        readable = [tool for tool in read if tool is not None]
        self._skipped.add("tool", len(tools[self._room :]))
        self._room -= len(tools[: self._room])
        return readable

    def _add_other(self, tool: ResponseTool, where: str | None) -> None:
        """Add a search for tools that the client does; drop the tools of servers."""
        if tool.type == TOOL_SEARCH and tool.execution == "client" and len(self._described) < MAX_FUNCTIONS:
            self._add(ClientTool(TOOL_SEARCH, TOOL_SEARCH), tool, where)
        else:
            self._skipped.add_tool(tool.type)

    def _add(self, named: ClientTool, tool: ResponseTool, where: str | None) -> None:
        self._described[named] = tool
        if where is not None:
            self.paths.setdefault(named, where)

    def _named(self) -> dict[ClientTool, str]:
        """Give each tool a name of its own: those of the request's own functions are theirs in any case."""
        own = [tool for tool in self._described if tool.kind == "function" and tool.namespace is None]
        names = {tool: tool.name for tool in own if tool in self.paths}
        taken = set(names.values())
        numbers: dict[str, int] = {}
        """The next one for names that were alike: hundreds may be."""
        for tool in self._described:
            if tool in names:
                continue
            name = flat = _flat_name(tool)
            while name in taken:
                number = numbers[flat] = numbers.get(flat, 1) + 1
                suffix = f"_{number}"
                name = flat[: MAX_NAME - len(suffix)] + suffix
            names[tool] = name
            taken.add(name)
        return {tool: names[tool] for tool in self._described}


def _kind(tool: ResponseTool) -> ToolKind:
    return "custom" if tool.type == "custom" else "function"


def _flat_name(tool: ClientTool) -> str:
    """Return a name that functions may have; one that is too long keeps its beginning, and a hash tells it apart."""
    given = tool.name
    if tool.namespace not in (None, DEFAULT_NAMESPACE):
        joint = "" if tool.namespace.endswith("__") else "__"
        given = f"{tool.namespace}{joint}{tool.name}"
    name = _UNFIT.sub("_", given)
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARS]
    return f"{name[: MAX_NAME - _HASH_CHARS - 1]}_{digest}"


def _function(name: str, named: ClientTool, tool: ResponseTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if named.kind == "custom":
        description = "\n\n".join(filter(None, (tool.description, _format_note(tool.format))))
        if description:
            function["description"] = description
        function["parameters"] = _CUSTOM_PARAMETERS
        return {"type": "function", "function": function}
    for field in ("description", "parameters", "strict"):
        value = getattr(tool, field)
        if value is not None:
            function[field] = value
    return {"type": "function", "function": function}


def _format_note(given: Any) -> str:
    """Return what the model is told of the form of a custom tool's input; empty for any text."""
    if not isinstance(given, dict) or given.get("type") != "grammar":
        return ""
    syntax, definition = given.get("syntax"), given.get("definition")
    if not isinstance(syntax, str) or not isinstance(definition, str):
        return ""
    return f"`{CUSTOM_ARGUMENT}` has the form of this grammar ({syntax}):\n{definition}"
