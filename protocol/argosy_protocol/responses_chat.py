"""The chat that a Responses request stands for.

Router and engine call the pure function `responses_as_chat`, so both see the prompt of one chat: it is rendered,
hashed, routed and answered as if the client had sent that chat to /v1/chat/completions.

    Responses                                           chat
    ---------                                           ----
    instructions, and first messages of the roles       one message of the role system
      system and developer
    message                                             message of its role
    reasoning, message and function_call of one turn    reasoning, content and tool_calls of one message
    function_call_output                                a message of the role tool
    a final assistant's message that is not completed   continue_final_message
    tools, tool_choice                                  tools, tool_choice, parallel_tool_calls
    reasoning.effort                                    reasoning_effort
    text.format                                         response_format
    truncation: auto                                    truncate_prompt_tokens

Items of earlier responses come resolved (`response_history`).

Owns: the translation, and the names of fields in errors. Must not know: templates, tokens, stored responses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from argosy_protocol.allowed_tools import ALLOWED_TOOLS, allowed, function_name
from argosy_protocol.errors import ApiError, BadRequest
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage
from argosy_protocol.responses import (
    MAX_ITEMS,
    MAX_PARTS,
    ResponseContentPart,
    ResponseItem,
    ResponsesRequest,
    ResponseTool,
)

MAX_ALL_PARTS = 1 << 16
"""Content parts of all items together."""

_TEXT_PARTS = frozenset(("input_text", "output_text", "text"))
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
_FUNCTION_OF_TOOL = re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b")
_JSON_SCHEMA = "response_format.json_schema"


def responses_as_chat(
    request: ResponsesRequest, items: Sequence[ResponseItem] | None = None
) -> ChatCompletionRequest:
    """Return the chat.

    Args:
        items: the whole conversation, if the input refers to earlier responses; None: the input is all of it.

    Raises:
        BadRequest: an item or a tool that models cannot read, fields that contradict each other, or too many items.
    """
    if items is None:
        items = input_items(request)
    messages = _messages(request.instructions, items)
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
    _set_tools(chat, request)
    _set_format(chat, request)
    return chat


def input_items(request: ResponsesRequest) -> list[ResponseItem]:
    """Return the items of a request's input; a text is one message of the user."""
    given = request.input
    if isinstance(given, str):
        return [ResponseItem(type="message", role="user", content=given)]
    return given


def name_responses_field(error: ApiError, request: ResponsesRequest | None = None) -> ApiError:
    """Return an error about the chat with the names of the Responses request, in `param` and in the message.

    Args:
        request: tells which item has the image that models do not read; None: the error names the input only.
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
        asked = _FUNCTION_OF_TOOL.sub(r"\1", _MESSAGE_OF_CHAT.sub("input", given))
    if error.message.startswith(_IMAGE_OF_CHAT):
        error.message = "content of type 'input_image'" + error.message.removeprefix(_IMAGE_OF_CHAT)
        asked = (_first_image(request) if request is not None else None) or asked
    error.param = asked
    for start in (given, head):
        if asked != given and error.message.startswith(start):
            error.message = asked + error.message.removeprefix(start)
            break
    return error


def _first_image(request: ResponsesRequest) -> str | None:
    """Return where the input has its first image, which is the one that a renderer of texts refuses."""
    for index, item in enumerate(input_items(request)):
        for field, parts in (("content", item.content), ("output", item.output)):
            if not isinstance(parts, list):
                continue
            for at, part in enumerate(parts):
                kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
                if kind == "input_image":
                    return f"input[{index}].{field}[{at}]"
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


def _messages(instructions: str | None, items: Sequence[ResponseItem]) -> list[ChatMessage]:
    if len(items) > MAX_ITEMS:
        raise BadRequest(f"the conversation has more than {MAX_ITEMS} items", param="input")
    if sum(len(item.content) for item in items if isinstance(item.content, list)) > MAX_ALL_PARTS:
        raise BadRequest(f"input has more than {MAX_ALL_PARTS} content parts in all", param="input")
    messages: list[ChatMessage] = []
    if instructions:
        messages.append(ChatMessage(role="system", content=instructions))
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return _with_one_system_message(messages)


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
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return [ChatMessage(role="system", content=parts), *messages[count:]]


def _add_item(messages: list[ChatMessage], item: ResponseItem, where: str) -> None:
    match item.kind:
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            _add_reasoning(messages, item, where)
        case "function_call":
            _add_call(messages, item, where)
        case "function_call_output":
            if item.call_id is None:
                raise BadRequest(f"{where}.call_id is required", param=f"{where}.call_id")
            content = _content(_output(item.output, f"{where}.output"), f"{where}.output")
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=content))
        case "item_reference":
            raise BadRequest(f"{where}: there is no stored item {item.id!r}", param=f"{where}.id")
        case kind:
            raise BadRequest(f"{where}: items of type {kind!r} are not supported", param=f"{where}.type")


def _add_message(messages: list[ChatMessage], item: ResponseItem, where: str) -> None:
    role = item.role
    if role not in _ROLES:
        given = "is required" if role is None else f"must be one of {', '.join(sorted(_ROLES))}, not {role!r}"
        raise BadRequest(f"{where}.role {given}", param=f"{where}.role")
    if item.content is None:
        raise BadRequest(f"{where}.content is required", param=f"{where}.content")
    content = _content(item.content, f"{where}.content")
    last = messages[-1] if messages else None
    if role == "assistant" and last is not None and last.role == role and last.content in (None, ""):
        last.content = content
    else:
        messages.append(ChatMessage(role=role, content=content))


def _add_reasoning(messages: list[ChatMessage], item: ResponseItem, where: str) -> None:
    """Begin a turn of the assistant; a summary stands for reasoning whose content is not given."""
    if isinstance(item.content, str):
        texts = [item.content]
    else:
        texts = [part.text or "" for part in item.content or item.summary or ()]
    reasoning = "".join(texts)
    if not reasoning and item.encrypted_content is not None:
        where = f"{where}.encrypted_content"
        raise BadRequest(f"{where} was encrypted by another server, and no model here reads it", param=where)
    if reasoning:
        messages.append(ChatMessage(role="assistant", content="", reasoning=reasoning))


def _add_call(messages: list[ChatMessage], item: ResponseItem, where: str) -> None:
    for field in ("call_id", "name", "arguments"):
        if getattr(item, field) is None:
            raise BadRequest(f"{where}.{field} is required", param=f"{where}.{field}")
    if item.namespace is not None:
        raise BadRequest(f"{where}.namespace is not supported", param=f"{where}.namespace")
    call = {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments},
    }
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        messages.append(ChatMessage(role="assistant", tool_calls=[call]))
        return
    if last.tool_calls is None:
        last.tool_calls = [call]
        last.content = last.content or None
    else:
        last.tool_calls.append(call)


def _output(output: Any, where: str) -> str | list[ResponseContentPart]:
    """Return the text or the parts of a function's output."""
    if isinstance(output, str):
        return output
    if not isinstance(output, list) or len(output) > MAX_PARTS:
        raise BadRequest(f"{where} must be a text or at most {MAX_PARTS} content parts", param=where)
    try:
        return msgspec.convert(output, list[ResponseContentPart])
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where} must be a text or content parts: {error}", param=where) from None


def _content(content: str | list[ResponseContentPart], where: str) -> str | list[dict[str, Any]]:
    """Return one text as it is: clients write most messages as a list of one part."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: ResponseContentPart, where: str) -> dict[str, Any]:
    """Return a part as chats have it. Whether the model takes images or files, its renderer says."""
    if part.type in _TEXT_PARTS:
        if part.text is None:
            raise BadRequest(f"{where}.text is required", param=f"{where}.text")
        return {"type": "text", "text": part.text}
    if part.type == "refusal":
        if part.refusal is None:
            raise BadRequest(f"{where}.refusal is required", param=f"{where}.refusal")
        return {"type": "text", "text": part.refusal}
    if part.type == "input_image" and part.image_url is not None:
        image = {"url": part.image_url} | ({"detail": part.detail} if part.detail else {})
        return {"type": "image_url", "image_url": image}
    raise BadRequest(f"{where}: content of type {part.type!r} is not supported here", param=where)


def _set_tools(chat: ChatCompletionRequest, request: ResponsesRequest) -> None:
    tools = [_tool(tool, index) for index, tool in enumerate(request.tools or ())]
    choice = request.tool_choice
    if choice not in (None, "auto", "none") and not tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, dict):
        choice, tools = _chosen(choice, tools)
    elif choice not in (None, "auto", "none", "required"):
        raise BadRequest(
            f"tool_choice must be none, auto, required or a function, not {choice!r}", param="tool_choice"
        )
    chat.tools = tools or None
    if tools:
        chat.tool_choice = choice
        chat.parallel_tool_calls = request.parallel_tool_calls


def _tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        where = f"tools[{index}].type"
        raise BadRequest(
            f"{where}: {tool.type!r} is a tool of OpenAI's servers and not supported here; describe yours as a "
            "function",
            param=where,
        )
    if tool.name is None:
        where = f"tools[{index}].name"
        raise BadRequest(f"{where} is required", param=where)
    function: dict[str, Any] = {"name": tool.name}
    for field in ("description", "parameters", "strict"):
        value = getattr(tool, field)
        if value is not None:
            function[field] = value
    return {"type": "function", "function": function}


def _chosen(
    choice: dict[str, Any], tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any], list[dict[str, Any]]]:
    """Return a chat's choice, and the tools that it allows."""
    kind = choice.get("type")
    if kind == "function":
        name = choice.get("name")
        if not isinstance(name, str) or name not in map(function_name, tools):
            raise BadRequest("tool_choice.name must be the name of one of tools", param="tool_choice.name")
        return {"type": "function", "function": {"name": name}}, tools
    if kind == ALLOWED_TOOLS:
        named = choice.get("tools")
        names = (
            [tool.get("name") if isinstance(tool, dict) else None for tool in named]
            if isinstance(named, list)
            else []
        )
        return allowed(tools, choice.get("mode"), names, "tool_choice")
    raise BadRequest(f"tool_choice.type: {kind!r} is not supported", param="tool_choice.type")


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
