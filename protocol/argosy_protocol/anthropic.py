"""Anthropic wire types: requests and answers of /v1/messages and /v1/messages/count_tokens.

Router and engine decode the same bytes with the same decoder, and `anthropic_chat` makes the same chat of them.
Decoding is as strict as OpenAI's (`openai`): every field has a bound, and unknown fields are ignored, such as
`cache_control`, since prefixes are cached without being asked. A content block is one struct for all its types, because
new types appear faster than schemas; `anthropic_chat` skips those that a model cannot read.

Owns: the types, and the shape of errors. Must not know: chats, prompts, HTTP.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import ApiError, BadRequest
from argosy_protocol.json_limits import decode_body
from argosy_protocol.null_defaults import Nullable
from argosy_protocol.openai import (
    MAX_MESSAGES,
    MAX_MODEL_NAME,
    MAX_TOKENS,
    InternalFields,
    TokenIds,
)
from argosy_protocol.skipped_content import MAX_UNREADABLE

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


class _Typed(Struct):
    type: Any = None


_Request = TypeVar("_Request")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_TYPE = msgspec.json.Decoder(_Typed)
_BLOCK = msgspec.json.Decoder(ContentBlock)
_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT_TOKENS = msgspec.json.Decoder(CountTokensRequest)


def decode_messages_request(body: bytes) -> MessagesRequest:
    """Decode a body of /v1/messages.

    Raises:
        BadRequest: not JSON, nested too deeply, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return _decoded(_MESSAGES, body)


def decode_count_tokens_request(body: bytes) -> CountTokensRequest:
    """Decode a body of /v1/messages/count_tokens.

    Raises:
        BadRequest, PayloadTooLarge: as `decode_messages_request`.
    """
    return _decoded(_COUNT_TOKENS, body)


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


def _with_readable_blocks(body: bytes) -> bytes | None:
    """Return a body with only the type of each block that is none of `READ_BLOCKS` and has fields of other types than
    ours; None if that does not make it readable."""
    try:
        fields = _FIELDS.decode(body)
        given = _RAWS.decode(fields["messages"])
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
    fields: dict[str, Any] = _FIELDS.decode(message)
    replaced = 0
    content = fields.get("content")
    if content is not None and bytes(content)[:1] == b"[":
        blocks = _RAWS.decode(content)
        if len(blocks) <= MAX_BLOCKS:
            fields["content"] = [_readable_block(block) for block in blocks]
            replaced = sum(read is not block for read, block in zip(fields["content"], blocks, strict=True))
    return fields, replaced


def _readable_block(block: msgspec.Raw) -> msgspec.Raw:
    with contextlib.suppress(msgspec.ValidationError):
        _BLOCK.decode(block)
        return block
    kind = _TYPE.decode(block).type
    if not isinstance(kind, str) or kind in READ_BLOCKS:
        return block
    return msgspec.Raw(msgspec.json.encode({"type": kind[:64] or "unknown"}))


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
