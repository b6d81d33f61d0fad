"""Anthropic's /v1/messages and /v1/messages/count_tokens: wire types, and the chat that a request stands for.

Router and engine decode the same bytes with the same decoder. Decoding is as strict as OpenAI's (`openai`): every field
has a bound, and unknown fields are ignored, such as `cache_control`, since prefixes are cached without being asked. A
content block is one struct for all its types, because new types appear faster than schemas.

Both call the pure function `as_chat`, so both see the prompt of one chat: it is rendered, hashed, routed and answered
as if the client had sent that chat to /v1/chat/completions.

    Messages                                            chat
    --------                                            ----
    system, and system messages before all others       a message of the role system
    later system messages                               text of the user, or of the last tool result
    text and images of a user's turn                    a message of the role user
    tool_result                                         a message of the role tool, before the turn's text
    text, thinking and tool_use of an assistant's turn  content, reasoning and tool_calls of one message
    a final assistant's turn                            continue_final_message
    tools, tool_choice                                  tools, tool_choice, parallel_tool_calls
    thinking                                            variables of the template, thinking_token_budget
    output_config                                       reasoning_effort, response_format

Consecutive messages of one role are one turn, as in Anthropic's API. A system message after the first turn becomes text
of the user: most templates take a system message at the beginning only, and one that moved there would change the
prompt from its first token on, and so leave nothing of it in the cache.

What no model here reads is left out, and counted (`skipped_content`): blocks of Anthropic's own tools, and tools that
only its servers run or only its models know. Documents that are no text leave a note, and images do where the model
sees none. That is so in the newest message as well, since agents join a message that was refused with the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import ApiError, BadRequest, ContextLengthExceeded
from argosy_protocol.json_limits import MAX_MODEL_NAME, Nullable, decode_body
from argosy_protocol.openai import (
    MAX_MESSAGES,
    MAX_TOKENS,
    ChatCompletionRequest,
    ChatMessage,
    InternalFields,
    Resume,
    ResumedChoice,
    TokenIds,
    function_name,
)
from argosy_protocol.skipped_content import (
    FIELDS,
    IMAGE_NOTE,
    MAX_UNREADABLE,
    MESSAGES_KINDS,
    OTHER,
    RAWS,
    Skipped,
    can_decode,
    image_part,
    only_type,
)

MAX_BLOCKS = 1024
"""Content blocks of one message, or of one tool result."""
MAX_STOP_SEQUENCES = 16
"""The engine's bound of stop strings."""
MIN_THINKING_BUDGET = 1024
"""Anthropic's."""
PATH = "/v1/messages"
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
"""Last event of a stream."""

_Id = Annotated[str, Meta(max_length=256)]
_Part = str | dict[str, Any]
"""A text, or a chat's part with an image."""


class ContentBlock(Struct, kw_only=True, omit_defaults=True):
    """One block of a message, of the system prompt or of a tool's result, with the fields of the types we read."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    text: str | None = None
    thinking: str | None = None
    id: _Id | None = None
    name: _Id | None = None
    input: dict[str, Any] | None = None
    tool_use_id: _Id | None = None
    content: Any = None
    """Of a tool's result: a text, or blocks. Other types have what they like."""
    is_error: bool | None = None
    source: Any = None
    """Of a document: an object. Of a search result: a text."""
    title: Any = None
    context: Any = None
    tool_name: Any = None


READ_BLOCKS = frozenset(
    (
        *("compaction", "document", "image", "redacted_thinking", "search_result", "text", "thinking"),
        *("tool_reference", "tool_result", "tool_use"),
    )
)
"""Types of blocks that say something to a model, or stand in its history for what it cannot read."""
_Blocks = Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]


class InputMessage(Struct, kw_only=True, omit_defaults=True):
    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class Tool(Struct, kw_only=True, omit_defaults=True):
    """A tool of the client's. `type` is that of a tool of Anthropic's own servers or models, unless it is `custom`."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    type: Annotated[str, Meta(max_length=64)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Struct, kw_only=True, omit_defaults=True):
    type: Literal["auto", "any", "tool", "none"]
    name: _Id | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, omit_defaults=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=MIN_THINKING_BUDGET, le=MAX_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True, omit_defaults=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, omit_defaults=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Struct, kw_only=True, omit_defaults=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class ResumedMessage(Struct, kw_only=True, omit_defaults=True):
    """The part of a stream that an earlier attempt has delivered; the answer continues after it."""

    token_ids: TokenIds
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    """Content blocks that have begun."""
    open_block: Literal["text", "thinking", "tool_use"] | None = None
    """Type of the last one, if it has not ended."""


class CountTokensRequest(InternalFields, kw_only=True, omit_defaults=True):
    """Body of /v1/messages/count_tokens: the fields that determine a prompt."""

    model: Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_NAME)]
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | _Blocks | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's field, as in chats."""
    data_parallel_rank: None = None
    """Only the header tells an engine the rank."""
    context_management: Any = None
    """What Anthropic's servers would leave out of a long conversation. Without effect: the model reads all of it."""
    # Decoded only to be refused: ignoring them would change the answer, unless they ask for nothing.
    mcp_servers: Any = None
    container: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True, omit_defaults=True):
    """Body of /v1/messages. `None` stands for the model's generation config."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    stream: Nullable[bool] = False
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=MAX_STOP_SEQUENCES)
        ]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    metadata: Metadata | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """As in chats; routers set it for keys whose cache is private."""
    priority: Nullable[Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]] = 0
    """As in chats; routers set it for keys with a priority."""
    resume: ResumedMessage | None = None
    """Sent by the router only; refused without its internal header."""


_Request = TypeVar("_Request")
_BLOCK = msgspec.json.Decoder(ContentBlock)


def _decoded(decoder: msgspec.json.Decoder[_Request], body: bytes) -> _Request:
    try:
        return decode_body(decoder, body)
    except BadRequest as error:
        if not (error.param or "").startswith("messages["):
            raise
        readable = _with_readable_blocks(body)
        if readable is None:
            raise
    return decode_body(decoder, readable)


decode_messages_request = partial(_decoded, msgspec.json.Decoder(MessagesRequest))
decode_count_tokens_request = partial(_decoded, msgspec.json.Decoder(CountTokensRequest))


def _with_readable_blocks(body: bytes) -> bytes | None:
    """Return a body with only the type of each block that is none of `READ_BLOCKS` and has fields of other types than
    ours; None if that does not make it readable."""
    try:
        fields = FIELDS.decode(body)
        given = RAWS.decode(fields["messages"])
        if len(given) > MAX_MESSAGES:
            return None
        num_replaced = 0
        messages = []
        for message in given:
            fields_of_message, replaced = _readable_message(message)
            num_replaced += replaced
            if num_replaced > MAX_UNREADABLE:
                return None
            messages.append(fields_of_message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return msgspec.json.encode({**fields, "messages": messages})


def _readable_message(message: msgspec.Raw) -> tuple[dict[str, Any], int]:
    """Return a message's fields, and how many of its blocks were replaced."""
    fields: dict[str, Any] = FIELDS.decode(message)
    replaced = 0
    content = fields.get("content")
    if content is not None and bytes(content)[:1] == b"[":
        blocks = RAWS.decode(content)
        if len(blocks) <= MAX_BLOCKS:
            fields["content"] = [_readable_block(block) for block in blocks]
            replaced = sum(read is not block for read, block in zip(fields["content"], blocks, strict=True))
    return fields, replaced


def _readable_block(block: msgspec.Raw) -> msgspec.Raw:
    return block if can_decode(_BLOCK, block) else only_type(block, READ_BLOCKS) or block


class OutputTokensDetails(Struct, frozen=True):
    thinking_tokens: int = 0


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Prompt tokens are the sum of `input_tokens`, those computed, and `cache_read_input_tokens`, those cached."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class TextBlock(Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: msgspec.Raw


class Message(Struct, frozen=True, kw_only=True):
    """Answer of /v1/messages, and, without content, the beginning of a streamed one."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class _ErrorDetails(Struct, frozen=True):
    error_code: str


class _Error(Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: _ErrorDetails | None = None


class _ErrorResponse(Struct, frozen=True, tag="error", tag_field="type"):
    error: _Error


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types by status; other refusals are `invalid_request_error`, other failures `api_error`."""


def is_messages_path(path: str) -> bool:
    """Whether errors of a path have Anthropic's shape: /v1/messages and all below it."""
    return path == PATH or path.startswith(PATH + "/")


def error_body(error: ApiError) -> bytes:
    """Encode an error as Anthropic's API does; `details.error_code` is our code, if the error has one."""
    other = "invalid_request_error" if error.http_status < 500 else "api_error"
    details = None if error.code is None else _ErrorDetails(error.code)
    return msgspec.json.encode(
        _ErrorResponse(_Error(_ERROR_TYPES.get(error.http_status, other), error.message, details))
    )


def error_event(error: ApiError) -> bytes:
    """Encode an error as the last event of a stream."""
    return b"event: error\ndata: %b\n\n" % error_body(error)


MAX_ALL_BLOCKS = 1 << 16
"""Blocks of all messages together: a tool's result becomes a message of its own, a call a function call."""
ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a system block by which Claude Code tells Anthropic who pays. It differs in every request, is not meant
for the model, and would keep every prompt behind it out of the cache."""

_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on or off."""
_CHAT_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}
_REFUSED = ("mcp_servers", "container")
_MISPLACED = frozenset(("redacted_thinking", "text", "thinking", "tool_result", "tool_use"))
"""Blocks of which each belongs to one role, or lacks what it says."""
_DOCUMENT_NOTE = "[document that the model does not get]"
_VERSION = re.compile(r"_\d{8}$")
"""End of the type of a tool of Anthropic's."""
_TOOL_OF_CHAT = re.compile(r"^(?P<tool>tools\[\d+\])\.(?P<path>function\.(?P<field>\w+)|function)")
_TOOL_FIELDS = {"parameters": "input_schema"}
_MESSAGE_OF_CHAT = re.compile(r"^messages\[\d+\][^\s:]*")


class _Turn(NamedTuple):
    """Consecutive messages of one role."""

    role: str
    blocks: list[tuple[int, int, ContentBlock]]
    """Each with the indices of its message and of the block; a message that is a text has one block, of index -1."""
    notes: set[int]
    """Indices of the messages in it that were of the role system."""


def as_chat(request: CountTokensRequest, skipped: Skipped | None = None) -> ChatCompletionRequest:
    """Return the chat; of a request to count tokens, what determines its prompt.

    Args:
        skipped: gets what the chat leaves out.

    Raises:
        BadRequest: a block that lacks a field, fields that contradict each other, or too many blocks.
    """
    if skipped is None:
        skipped = Skipped(MESSAGES_KINDS)
    for field in _REFUSED:
        if getattr(request, field):
            raise BadRequest(f"{field} is not supported", param=field)
    messages, is_continued = _chat_messages(request.system, request.messages, skipped)
    chat = ChatCompletionRequest(
        model=request.model,
        messages=messages,
        tools=_tools(request.tools or (), skipped) or None,
        continue_final_message=is_continued,
        add_generation_prompt=not is_continued,
    )
    _set_tool_choice(chat, request, skipped)
    _set_thinking(chat, request)
    if isinstance(request, MessagesRequest):
        _set_sampling(chat, request)
    return chat


def name_field(error: ApiError) -> ApiError:
    """Return an error about the chat with the names of the Messages request, in `param` and in the message: Anthropic's
    errors have no other place for it. A prompt that is too long is called what clients look for."""
    given = error.param
    if given is None:
        return error
    head = given.partition(".")[0]
    names = [given, head]
    if (found := _TOOL_OF_CHAT.match(given)) is not None:
        field = found["field"]
        asked = found["tool"] + (f".{_TOOL_FIELDS.get(field, field)}" if field else "")
        names.insert(1, found["path"])
    else:  # the chat counts its messages otherwise
        asked = _CHAT_FIELDS.get(head) or _MESSAGE_OF_CHAT.sub("messages", given)
    error.param = asked
    for start in names:
        if error.message.startswith(start):
            error.message = asked + error.message.removeprefix(start)
            break
    if isinstance(error, ContextLengthExceeded):
        error.message = f"prompt is too long: {error.message}"
    elif asked not in error.message:
        error.message = f"{asked}: {error.message}"
    return error


def _chat_messages(
    system: str | Sequence[ContentBlock] | None, given: Sequence[InputMessage], skipped: Skipped
) -> tuple[list[ChatMessage], bool]:
    """Return the chat's messages, and whether the last one is to be continued."""
    if sum(len(message.content) for message in given if isinstance(message.content, list)) > MAX_ALL_BLOCKS:
        raise BadRequest(f"messages have more than {MAX_ALL_BLOCKS} content blocks in all", param="messages")
    first: list[ContentBlock] = []
    if system is not None:
        first += _system_blocks(system, "system")
    turns: list[_Turn] = []
    for number, message in enumerate(given):
        role = message.role
        if role == "system":
            blocks = _system_blocks(message.content, f"messages[{number}].content")
            if not turns:
                first += blocks
            if not turns or not blocks:
                continue
            role = "user"
        elif isinstance(message.content, str):
            blocks = [ContentBlock(type="text", text=message.content)]
        else:
            blocks = message.content
            if not blocks and role == "user":
                where = f"messages[{number}].content"
                raise BadRequest(f"{where} must not be empty", param=where)
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role, [], set()))
        if message.role == "system":
            turns[-1].notes.add(number)
        first_index = -1 if isinstance(message.content, str) else 0
        turns[-1].blocks.extend((number, index, block) for index, block in enumerate(blocks, first_index))
    if not turns:
        raise BadRequest("messages must have one of the role user", param="messages")
    messages = [ChatMessage(role="system", content=_content([b.text or "" for b in first]))] if first else []
    for turn in turns:
        if turn.role == "user":
            _add_user(messages, turn, skipped)
        else:
            messages.append(_assistant(turn, skipped))
    if not messages:
        raise BadRequest("messages have nothing that a model can read", param="messages")
    is_continued = turns[-1].role == "assistant"
    if is_continued:
        _check_continued(turns[-1])
    if is_continued and messages[-1].tool_calls:
        raise BadRequest(
            "messages: the last one has tool_use, whose tool_result must follow it", param="messages"
        )
    return messages, is_continued


def _check_continued(turn: _Turn) -> None:
    """Refuse thoughts at the end, as Anthropic does: an answer goes on in the content, which comes after them."""
    if not turn.blocks:
        return
    number, index, block = turn.blocks[-1]
    if block.type in ("thinking", "redacted_thinking"):
        where = _path(number, index)
        raise BadRequest(
            f"{where}: the last block of a final assistant message, which is continued, cannot be {block.type!r}; "
            "add a text, or leave the message out",
            param=where,
        )


def _system_blocks(content: str | Sequence[ContentBlock], where: str) -> list[ContentBlock]:
    if isinstance(content, str):
        return [ContentBlock(type="text", text=content)]
    for index, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise _misplaced(block, f"{where}[{index}]")
    return [block for block in content if not (block.text or "").startswith(ATTRIBUTION)]


def _add_user(messages: list[ChatMessage], turn: _Turn, skipped: Skipped) -> None:
    """Append the turn's tool results, then its text.

    If all its text was of the role system, it belongs to the last result: templates drop the reasoning before a message
    of the user, and here the user said nothing.
    """
    texts: list[_Part] = []
    results, has_user = [], False
    for number, index, block in turn.blocks:
        if block.type == "tool_result":
            results.append((block, number, index))
        elif (said := _block_parts(block, skipped)) is not None:
            texts += said
            has_user = has_user or (bool(said) and number not in turn.notes)
        else:
            raise _misplaced(block, _path(number, index))
    notes = [] if has_user else texts
    for position, result in enumerate(results, 1):
        messages.append(_tool_result(*result, notes if position == len(results) else [], skipped))
    if texts and (has_user or not results):
        messages.append(ChatMessage(role="user", content=_content(texts)))


def _tool_result(
    block: ContentBlock, number: int, index: int, notes: Sequence[_Part], skipped: Skipped
) -> ChatMessage:
    where = _path(number, index)
    if block.tool_use_id is None:
        raise BadRequest(f"{where}.tool_use_id is required", param=f"{where}.tool_use_id")
    texts = _result_parts(block.content, f"{where}.content", skipped)
    if block.is_error:
        first = texts[0]
        texts[:1] = [f"Error: {first}" if first else "Error"] if isinstance(first, str) else ["Error", first]
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_content([*texts, *notes]))


def _result_parts(content: Any, where: str, skipped: Skipped) -> list[_Part]:
    """Return the texts and images of a tool's result, at least one: agents send it back whatever it is."""
    if not isinstance(content, list):
        return ["" if content is None else content if isinstance(content, str) else _json(content)]
    if len(content) > MAX_BLOCKS:
        raise BadRequest(f"{where} must be a text or at most {MAX_BLOCKS} content blocks", param=where)
    texts: list[_Part] = []
    for part in content:
        block = skipped.read(part, ContentBlock, OTHER)
        if block is None:
            continue
        said = _block_parts(block, skipped)
        if said is None:
            skipped.add(block.type)
        else:
            texts += said
    return texts or [""]


def _block_parts(block: ContentBlock, skipped: Skipped) -> Sequence[_Part] | None:
    """Return what a block of the user or of a tool says; nothing if it is skipped, None if it does not belong there."""
    match block.type:
        case "text" if block.text is not None:
            return [block.text]
        case "image":
            url = _image_url(block.source)
            if url is None:  # such as a file of Anthropic's servers
                skipped.add("image")
                return [IMAGE_NOTE]
            return [image_part(url, or_note=True)]
        case "document":
            return _document_texts(block, skipped)
        case "search_result":
            found = _inner_texts(block.content)
            head = ": ".join(text for text in (block.title, block.source) if isinstance(text, str))
            return ["\n".join(filter(None, (head, *found)))]
        case "tool_reference" if isinstance(block.tool_name, str):
            return [f"[the tool {block.tool_name} can be called now]"]
        case kind if kind in _MISPLACED:
            return None
        case kind:
            skipped.add(kind)
            return []


def _image_url(source: Any) -> str | None:
    """Return the URL of an image; None if it is elsewhere."""
    if not isinstance(source, dict):
        return None
    kind, url = source.get("type"), source.get("url")
    media_type, data = source.get("media_type"), source.get("data")
    if kind == "base64" and isinstance(media_type, str) and isinstance(data, str):
        return f"data:{media_type};base64,{data}"
    return url if kind == "url" and isinstance(url, str) else None


def _document_texts(block: ContentBlock, skipped: Skipped) -> list[str]:
    """Return the text of a document with its title; a note in place of one that is no text."""
    source = block.source if isinstance(block.source, dict) else {}
    content = source.get("data") if source.get("type") == "text" else source.get("content")
    texts = [content] if isinstance(content, str) else _inner_texts(content)
    if not texts:
        skipped.add("document")
        texts = [_DOCUMENT_NOTE]
    head = [text for text in (block.title, block.context) if isinstance(text, str)]
    return ["\n".join(filter(None, (*head, *texts)))]


def _inner_texts(content: Any) -> list[str]:
    """Return the texts among the blocks of a block."""
    blocks = content[:MAX_BLOCKS] if isinstance(content, list) else ()
    texts = (block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text")
    return [text for text in texts if isinstance(text, str)]


def _assistant(turn: _Turn, skipped: Skipped) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for number, index, block in turn.blocks:
        match block.type:
            case "text" if block.text is not None:
                texts.append(block.text)
            case "thinking" if block.thinking is not None:
                thoughts.append(block.thinking)
            case "redacted_thinking":
                pass  # encrypted by another server; no model reads it
            case "tool_use":
                calls.append(_tool_call(block, _path(number, index)))
            case "compaction" if isinstance(block.content, str):
                texts.append(block.content)
            case kind if kind in _MISPLACED:
                raise _misplaced(block, _path(number, index))
            case kind:
                skipped.add(kind)
    return ChatMessage(
        role="assistant",
        content=_content(texts) if texts or not calls else None,
        reasoning="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _tool_call(block: ContentBlock, where: str) -> dict[str, Any]:
    for field in ("id", "name", "input"):
        if getattr(block, field) is None:
            raise BadRequest(f"{where}.{field} is required", param=f"{where}.{field}")
    arguments = _json(block.input)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _content(parts: Sequence[_Part]) -> str | list[dict[str, Any]]:
    """Return one text as it is: clients write most messages as a list of one block."""
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _path(number: int, index: int) -> str:
    return f"messages[{number}].content" + (f"[{index}]" if index >= 0 else "")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _misplaced(block: ContentBlock, where: str) -> BadRequest:
    if block.type in ("text", "thinking"):
        where = f"{where}.{block.type}"
        return BadRequest(f"{where} is required", param=where)
    return BadRequest(f"{where}: content of type {block.type!r} is not supported here", param=where)


def _tools(tools: Sequence[Tool], skipped: Skipped) -> list[dict[str, Any]]:
    """Return the client's tools as functions. Those of Anthropic's servers, which a model here does not know, are
    dropped."""
    functions = []
    for index, tool in enumerate(tools):
        if tool.type in (None, "custom"):
            functions.append(_tool(tool, index))
        else:
            skipped.add_tool(_VERSION.sub("", tool.type))
    return functions


def _tool(tool: Tool, index: int) -> dict[str, Any]:
    for field in ("name", "input_schema"):
        if getattr(tool, field) is None:
            where = f"tools[{index}].{field}"
            raise BadRequest(f"{where} is required", param=where)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    schema = tool.input_schema or {}
    function["parameters"] = schema if "type" in schema else {"type": "object", **schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _set_tool_choice(chat: ChatCompletionRequest, request: CountTokensRequest, skipped: Skipped) -> None:
    choice = request.tool_choice
    if choice is None or (choice.type == "auto" and skipped.tools and not chat.tools):
        return
    if choice.type != "none" and not chat.tools:
        dropped = skipped.dropped_tools
        why = f"; of those given, this server runs none: {dropped}" if dropped else ""
        raise BadRequest(f"tool_choice needs tools{why}", param="tool_choice")
    match choice.type:
        case "any":
            chat.tool_choice = "required"
        case "tool":
            if choice.name is None:
                raise BadRequest("tool_choice.name is required", param="tool_choice.name")
            if skipped.tools and choice.name not in map(function_name, chat.tools or ()):
                raise BadRequest(
                    f"tool_choice.name: {choice.name!r} is a tool that this server does not run",
                    param="tool_choice.name",
                )
            chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
        case kind:
            chat.tool_choice = kind
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def _set_thinking(chat: ChatCompletionRequest, request: CountTokensRequest) -> None:
    """Without `thinking` the template decides, as in a chat."""
    thinking, config = request.thinking, request.output_config
    variables: dict[str, Any] = {}
    if thinking is not None:
        _check_budget(thinking, request)
        is_on = thinking.type != "disabled"
        variables = dict.fromkeys(_THINKING_VARIABLES, is_on)
        chat.thinking_token_budget = thinking.budget_tokens if thinking.type == "enabled" else None
        chat.include_reasoning = is_on and thinking.display != "omitted"
    if request.chat_template_kwargs:
        variables |= request.chat_template_kwargs
    chat.chat_template_kwargs = variables or None
    if config is not None:
        chat.reasoning_effort = config.effort
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema}
            chat.response_format = {"type": "json_schema", "json_schema": schema}


def _check_budget(thinking: Thinking, request: CountTokensRequest) -> None:
    if thinking.type != "enabled":
        return
    if thinking.budget_tokens is None:
        raise BadRequest("thinking.budget_tokens is required", param="thinking.budget_tokens")
    if isinstance(request, MessagesRequest) and thinking.budget_tokens >= request.max_tokens:
        raise BadRequest(
            "thinking.budget_tokens must be less than max_tokens", param="thinking.budget_tokens"
        )


def _set_sampling(chat: ChatCompletionRequest, request: MessagesRequest) -> None:
    stops = request.stop_sequences or []
    for index, stop in enumerate(stops):
        if not stop.strip():
            where = f"stop_sequences[{index}]"
            raise BadRequest(f"{where} must not be white space", param=where)
    chat.stop = stops or None
    chat.max_tokens = request.max_tokens
    chat.stream = request.stream
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.cache_salt = request.cache_salt
    chat.priority = request.priority
    chat.user = request.metadata.user_id if request.metadata is not None else None
    if request.resume is not None:
        chat.resume = Resume(created=0, choices=[ResumedChoice(token_ids=request.resume.token_ids)])
