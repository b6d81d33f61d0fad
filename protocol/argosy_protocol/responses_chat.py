"""The chat that a Responses request stands for.

Router and engine call the pure function `responses_as_chat`, so both see the prompt of one chat: it is rendered,
hashed, routed and answered as if the client had sent that chat to /v1/chat/completions.

    Responses                                           chat
    ---------                                           ----
    instructions, and first messages of the roles       one message of the role system
      system and developer
    message                                             message of its role
    reasoning, message and calls of one turn            reasoning, content and tool_calls of one message
    function_call_output, and those of other tools      a message of the role tool
    agent_message                                       a message of the role user
    a final assistant's message that is not completed   continue_final_message
    tools, additional_tools, tool_choice                tools, tool_choice, parallel_tool_calls
      function                                            function
      custom, whose input is a text                       function with one argument, `input`
      namespace of functions and custom tools             functions named NAMESPACE__NAME; those of `functions` by NAME
      tool_search that the client does                    function `tool_search`
      tools of OpenAI's servers                           none
    reasoning.effort                                    reasoning_effort
    text.format                                         response_format
    truncation: auto                                    truncate_prompt_tokens

Items of earlier responses come resolved (`response_history`).

What no model here reads is skipped, and counted (`skipped_content`): items of other servers, reasoning that is
encrypted, and in history also parts. Images of messages and of tools' outputs go to the renderer, which leaves a note
of those in history if the model sees none. Only in the newest message of the user an image for such a model, a file or
an unknown part is refused, since its client can still send something else. Tools also come in items of the input, as
agents add some in the middle of a conversation; those are history, so what cannot be read of them is skipped too.

Invariant: no two functions have the same name, and a name is the same in each request that has the same tools in the
same order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from argosy_protocol.errors import ApiError, BadRequest
from argosy_protocol.openai import ALLOWED_TOOLS, ChatCompletionRequest, ChatMessage, allowed
from argosy_protocol.responses import (
    MAX_ITEMS,
    MAX_PARTS,
    TEXT_PARTS,
    ResponseContentPart,
    ResponseItem,
    ResponsesRequest,
    ResponseTool,
)
from argosy_protocol.skipped_content import IMAGE_NOTE, RESPONSES_KINDS, Skipped, image_part

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


MAX_ALL_PARTS = 1 << 16
"""Content parts of all items together."""

_OF_MODEL = frozenset(
    (
        "custom_tool_call",
        "function_call",
        "local_shell_call",
        "reasoning",
        "tool_search_call",
        "web_search_call",
    )
)
"""Items that a model has written, as messages of the assistant are."""
_NOTES = {
    "computer_screenshot": IMAGE_NOTE,
    "input_audio": "[audio that the model does not get]",
    "input_file": "[file that the model does not get]",
    "input_image": IMAGE_NOTE,
}
"""What the model reads in place of parts."""
_SYSTEM_ROLES = frozenset(("system", "developer"))
_ROLES = frozenset(("user", "assistant", "system", "developer"))
_SAMPLING = (
    *("cache_salt", "chat_template_kwargs", "frequency_penalty", "ignore_eos", "include_reasoning"),
    *("include_stop_str_in_output", "logit_bias", "min_p", "model", "presence_penalty", "priority"),
    *("prompt_cache_key", "repetition_penalty", "request_id", "seed", "session_id", "skip_special_tokens"),
    *("stop", "stop_token_ids", "stream", "structured_outputs", "temperature", "top_k", "top_p", "user"),
    "vllm_xargs",
)
"""Fields that chats have by the same name and with the same meaning."""
_CHAT_FIELDS = {
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
}
_MESSAGE_OF_CHAT = re.compile(r"^messages(?:\[\d+\][^\s:]*)?")
_IMAGE_OF_CHAT = "content of type 'image_url'"
"""Beginning of a renderer's message about an image."""
_FUNCTION_OF_TOOL = re.compile(r"^(tools\[(\d+)\]|tool_choice)\.function\b")
_JSON_SCHEMA = "response_format.json_schema"


class TranslatedResponse(NamedTuple):
    chat: ChatCompletionRequest
    tools: ResponseTools
    """Which tools the chat's functions stand for."""
    skipped: Skipped


def responses_as_chat(
    request: ResponsesRequest, items: Sequence[ResponseItem] | None = None
) -> ChatCompletionRequest:
    """Return the chat; see `translated_response`."""
    return translated_response(request, items).chat


def translated_response(
    request: ResponsesRequest, items: Sequence[ResponseItem] | None = None
) -> TranslatedResponse:
    """Return the chat, and what an answer needs to know of the translation.

    Args:
        items: the whole conversation, if the input refers to earlier responses; None: the input is all of it.

    Raises:
        BadRequest: an item that lacks a field, fields that contradict each other, or too many items.
    """
    if items is None:
        items = input_items(request)
    if len(items) > MAX_ITEMS:
        raise BadRequest(f"the conversation has more than {MAX_ITEMS} items", param="input")
    skipped = Skipped(RESPONSES_KINDS)
    tools = ResponseTools(request, items, skipped)
    messages = _Conversation(items, tools, skipped).messages(request.instructions)
    if not messages:
        raise BadRequest("input must not be empty", param="input")
    is_continued = _is_unfinished(items)
    chat = ChatCompletionRequest(
        messages=messages,
        continue_final_message=is_continued,
        add_generation_prompt=not is_continued,
        max_tokens=request.max_output_tokens,
        **{name: getattr(request, name) for name in _SAMPLING},
    )
    if request.has_logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.truncation == "auto":
        chat.truncate_prompt_tokens = -1
    choice, functions = tools.chosen(request.tool_choice)
    if functions:
        chat.tools, chat.tool_choice = functions, choice
        chat.parallel_tool_calls = request.parallel_tool_calls
    _set_format(chat, request)
    return TranslatedResponse(chat, tools, skipped)


def input_items(request: ResponsesRequest) -> list[ResponseItem]:
    """Return the items of a request's input; a text is one message of the user."""
    given = request.input
    if isinstance(given, str):
        return [ResponseItem(type="message", role="user", content=given)]
    return given


def name_responses_field(
    error: ApiError, request: ResponsesRequest | None = None, tools: ResponseTools | None = None
) -> ApiError:
    """Return an error about the chat with the names of the Responses request, in `param` and in the message.

    Args:
        request: tells which item has the image that models do not read; None: the error names the input only.
        tools: tell which tool a function of the chat stands for; None: the one of the same index.
    """
    given = error.param
    if given is None:
        return error
    head = given.partition(".")[0]
    if given.startswith(_JSON_SCHEMA):
        asked = "text.format" + given.removeprefix(_JSON_SCHEMA)
    elif head in _CHAT_FIELDS:
        asked = _CHAT_FIELDS[head]
    else:  # the chat counts its messages otherwise
        asked = _FUNCTION_OF_TOOL.sub(
            lambda found: _tool_path(found, tools), _MESSAGE_OF_CHAT.sub("input", given)
        )
    if error.message.startswith(_IMAGE_OF_CHAT):
        error.message = "content of type 'input_image'" + error.message.removeprefix(_IMAGE_OF_CHAT)
        asked = (_first_image(request) if request is not None else None) or asked
    error.param = asked
    for start in (given, head):
        if asked != given and error.message.startswith(start):
            error.message = asked + error.message.removeprefix(start)
            break
    return error


def _tool_path(found: re.Match[str], tools: ResponseTools | None) -> str:
    if tools is None or found[2] is None:
        return found[1]
    return tools.path(int(found[2])) or "input"


def _first_image(request: ResponsesRequest) -> str | None:
    """Return where the newest messages have their first image, which is the one that a renderer of texts refuses."""
    items = input_items(request)
    for index in range(_newest_message(items), len(items)):
        content = items[index].content
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if part.type == "input_image":
                return f"input[{index}].content[{at}]"
    return None


def _is_unfinished(items: Sequence[ResponseItem]) -> bool:
    """Whether the model is to continue the last message, as in vLLM."""
    last = items[-1] if items else None
    return (
        last is not None
        and last.kind == "message"
        and last.role == "assistant"
        and last.status in ("in_progress", "incomplete")
    )


class _Conversation:
    """Makes messages of items."""

    def __init__(self, items: Sequence[ResponseItem], tools: ResponseTools, skipped: Skipped) -> None:
        self._items = items
        self._tools = tools
        self._skipped = skipped
        self._messages: list[ChatMessage] = []
        self._newest = _newest_message(items)

    def messages(self, instructions: str | None) -> list[ChatMessage]:
        items = self._items
        if sum(len(item.content) for item in items if isinstance(item.content, list)) > MAX_ALL_PARTS:
            raise BadRequest(f"input has more than {MAX_ALL_PARTS} content parts in all", param="input")
        if instructions:
            self._messages.append(ChatMessage(role="system", content=instructions))
        for index, item in enumerate(items):
            self._add_item(item, index)
        return _with_one_system_message(self._messages)

    def _add_item(self, item: ResponseItem, index: int) -> None:
        where = f"input[{index}]"
        match item.kind:
            case "message":
                self._add_message(item, where, is_newest=index >= self._newest)
            case "agent_message":
                self._add_agent_message(item)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                _require(item, ("call_id", "name", "arguments"), where)
                if not isinstance(item.arguments, str):
                    raise BadRequest(f"{where}.arguments must be a text", param=f"{where}.arguments")
                self._add_call(item, ClientTool("function", item.name or "", item.namespace), item.arguments)
            case "custom_tool_call":
                _require(item, ("call_id", "name", "input"), where)
                arguments = _json({CUSTOM_ARGUMENT: item.input})
                self._add_call(item, ClientTool("custom", item.name or "", item.namespace), arguments)
            case "local_shell_call" if isinstance(item.action, dict):
                self._add_call(item, ClientTool("function", "local_shell"), _json(item.action))
            case "tool_search_call" if item.call_id is not None:
                arguments = item.arguments if isinstance(item.arguments, str) else _json(item.arguments or {})
                self._add_call(item, ClientTool(TOOL_SEARCH, TOOL_SEARCH), arguments)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._add_output(item)
            case "tool_search_output" if item.call_id is not None:
                self._add_result(item.call_id, _found_tools(item.tools))
            case "additional_tools":
                pass  # `ResponseTools` has them
            case "item_reference":
                raise BadRequest(f"{where}: there is no stored item {item.id!r}", param=f"{where}.id")
            case "compaction_trigger" if index == len(self._items) - 1:
                raise BadRequest(
                    f"{where}: this server does not compact conversations; ask the model for a summary, and begin a "
                    "new conversation with that",
                    param=f"{where}.type",
                )
            case kind:
                self._skipped.add(kind)

    def _add_message(self, item: ResponseItem, where: str, *, is_newest: bool) -> None:
        role = item.role
        if role not in _ROLES:
            given = (
                "is required" if role is None else f"must be one of {', '.join(sorted(_ROLES))}, not {role!r}"
            )
            raise BadRequest(f"{where}.role {given}", param=f"{where}.role")
        if item.content is None:
            raise BadRequest(f"{where}.content is required", param=f"{where}.content")
        content = self._content(item.content, f"{where}.content", is_newest)
        last = self._last
        if role == "assistant" and last is not None and last.role == role and last.content in (None, ""):
            last.content = content
        else:
            self._messages.append(ChatMessage(role=role, content=content))

    def _add_agent_message(self, item: ResponseItem) -> None:
        """Add what another agent has said as text of the user."""
        parts = [item.content] if isinstance(item.content, str) else self._texts(item.content or ())
        if not any(parts):
            self._skipped.add("agent_message")
            return
        people = [f" {word} {name}" for word, name in (("from", item.author), ("to", item.recipient)) if name]
        heading = f"Message{''.join(people)}:" if people else "Message of another agent:"
        self._messages.append(ChatMessage(role="user", content="\n".join([heading, *parts])))

    def _add_reasoning(self, item: ResponseItem) -> None:
        """Begin a turn of the assistant; a summary stands for reasoning whose content is not given."""
        if isinstance(item.content, str):
            texts = [item.content]
        else:
            texts = [part.text or "" for part in item.content or item.summary or ()]
        reasoning = "".join(texts)
        if reasoning:
            self._messages.append(ChatMessage(role="assistant", content="", reasoning=reasoning))
        elif item.encrypted_content is not None:
            self._skipped.add("reasoning")  # another server has encrypted it

    def _add_call(self, item: ResponseItem, tool: ClientTool, arguments: str) -> None:
        function = {"name": self._tools.name_of(tool), "arguments": arguments}
        call = {"id": item.call_id or item.id or "", "type": "function", "function": function}
        last = self._last
        if last is None or last.role != "assistant":
            self._messages.append(ChatMessage(role="assistant", tool_calls=[call]))
            return
        if last.tool_calls is None:
            last.tool_calls = [call]
            last.content = last.content or None
        else:
            last.tool_calls.append(call)

    def _add_output(self, item: ResponseItem) -> None:
        """Add what a tool has returned, as far as it is text: agents send it back whatever it is."""
        output = item.output
        if isinstance(output, list):
            parts = self._readable(output[:MAX_PARTS], item.kind)
            made = [self._part(part, "", False) for part in parts]
            self._skipped.add(item.kind, len(output[MAX_PARTS:]))
            self._add_result(item.call_id or item.id, _joined([part for part in made if part is not None]))
        else:
            text = output if isinstance(output, str) else "" if output is None else _json(output)
            self._add_result(item.call_id or item.id, text)

    def _readable(self, parts: list[Any], kind: str) -> list[ResponseContentPart]:
        """Return those of an output's parts that can be read."""
        read = (self._skipped.read(part, ResponseContentPart, kind) for part in parts)
        return [part for part in read if part is not None]

    def _add_result(self, call_id: str | None, content: str | list[dict[str, Any]]) -> None:
        self._messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=content))

    def _content(
        self, content: str | list[ResponseContentPart], where: str, is_newest: bool
    ) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content
        parts = [self._part(part, f"{where}[{index}]", is_newest) for index, part in enumerate(content)]
        return _joined([part for part in parts if part is not None])

    def _texts(self, parts: Iterable[ResponseContentPart]) -> list[str]:
        """Return the texts of parts, with a note in place of each that is none."""
        made = (self._text_part(part) for part in parts)
        return [part["text"] for part in made if part is not None]

    def _part(self, part: ResponseContentPart, where: str, is_newest: bool) -> dict[str, Any] | None:
        """Return a part as chats have it; None if it is skipped.

        Args:
            is_newest: an image is refused by a renderer whose model sees none, and leaves no note.

        Raises:
            BadRequest: it is in the newest message, and no text.
        """
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in TEXT_PARTS and text is not None:
            return _text(text)
        if part.type == "input_image" and part.image_url is not None:
            return image_part(part.image_url, part.detail, or_note=not is_newest)
        if is_newest:
            if part.type in TEXT_PARTS:
                where = f"{where}.{'refusal' if part.type == 'refusal' else 'text'}"
                raise BadRequest(f"{where} is required", param=where)
            raise BadRequest(f"{where}: content of type {part.type!r} is not supported here", param=where)
        return self._text_part(part)

    def _text_part(self, part: ResponseContentPart) -> dict[str, Any] | None:
        """Return a part's text, or a note in place of what is none; None if it is skipped."""
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in TEXT_PARTS and text is not None:
            return _text(text)
        self._skipped.add(part.type)
        note = _NOTES.get(part.type)
        return None if note is None else _text(note)

    @property
    def _last(self) -> ChatMessage | None:
        return self._messages[-1] if self._messages else None


def _newest_message(items: Sequence[ResponseItem]) -> int:
    """Return the index from which on messages are new: that of the user's last one, unless a model has answered it."""
    newest = len(items)
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if item.kind == "message" and item.role != "assistant":
            newest = index
            if item.role == "user":
                return newest
        elif item.kind in _OF_MODEL or item.kind == "message":
            return newest
    return newest


def _with_one_system_message(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Join the first messages of the roles system and developer: most templates take one only."""
    count = 0
    while count < len(messages) and messages[count].role in _SYSTEM_ROLES:
        count += 1
    if count < 2:
        return messages
    parts: list[dict[str, Any]] = []
    for message in messages[:count]:
        content = message.content
        parts += [_text(content)] if isinstance(content, str) else content or []
    return [ChatMessage(role="system", content=parts), *messages[count:]]


def _require(item: ResponseItem, fields: Iterable[str], where: str) -> None:
    for field in fields:
        if getattr(item, field) is None:
            raise BadRequest(f"{where}.{field} is required", param=f"{where}.{field}")


def _found_tools(tools: Any) -> str:
    """Say which tools a search has found; the chat describes them with all others."""
    names = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    named = [name for name in names if isinstance(name, str)]
    return f"Found: {', '.join(named)}" if named else "Found no tools."


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return one text as it is: clients write most messages as a list of one part."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _set_format(chat: ChatCompletionRequest, request: ResponsesRequest) -> None:
    text = request.text
    if text is None or text.format is None or text.format.type == "text":
        return
    if request.structured_outputs is not None:
        raise BadRequest("structured_outputs and text.format exclude each other", param="structured_outputs")
    asked = text.format
    if asked.type == "json_object":
        chat.response_format = {"type": "json_object"}
        return
    schema: dict[str, Any] = {"name": asked.name, "schema": asked.schema}
    for field in ("description", "strict"):
        if getattr(asked, field) is not None:
            schema[field] = getattr(asked, field)
    chat.response_format = {"type": "json_schema", "json_schema": schema}
