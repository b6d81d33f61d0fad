"""Wire types of answers of OpenAI's /v1/responses: the response, its output items, and its usage.

An id tells to which response an item belongs: `resp_ID` has the output items `msg_ID_0`, `rs_ID_1` and so on, and the
input items `msg_ID_i0` and so on (`response_history` resolves references by it).

Owns: the types of answers. Must not know: requests' bounds, how answers are made.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import TokenLogprob
from argosy_protocol.responses import (
    ReasoningConfig,
    ResponseItem,
    ResponsesRequest,
    ResponseTool,
    TextConfig,
    TextFormat,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
SERVICE_TIER = "default"
"""The only one."""
ID_PREFIX = "resp_"
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_FINISHED = frozenset(("completed", "incomplete", "failed", "cancelled"))


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text", tag_field="type"):
    annotations: tuple[()] = ()
    logprobs: list[TokenLogprob] = []
    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputText]


class ReasoningText(Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    """Reasoning in full: models that show it need no summary, and its items need no encryption to be sent back."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    id: str
    status: ItemStatus
    arguments: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, frozen=True, kw_only=True, tag="custom_tool_call", tag_field="type"):
    id: str
    status: ItemStatus
    input: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET


class ToolSearchCallItem(Struct, frozen=True, kw_only=True, tag="tool_search_call", tag_field="type"):
    """A search for tools that the client does."""

    id: str
    status: ItemStatus
    arguments: msgspec.Raw
    call_id: str
    execution: str = "client"


CallItem = FunctionCallItem | CustomToolCallItem | ToolSearchCallItem
OutputItem = OutputMessage | ReasoningItem | CallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Zero: what a cache keeps costs nothing."""


class ReasoningTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    """Prompt tokens, including cached ones."""
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class InputTokenCount(Struct, frozen=True, kw_only=True):
    """Answer of /v1/responses/input_tokens."""

    object: str = "response.input_tokens"
    input_tokens: int


def compaction_not_supported() -> BadRequest:
    """Return the error about /v1/responses/compact: what it makes can be read by OpenAI's models only."""
    return BadRequest(
        "/v1/responses/compact is not supported: it returns encrypted items that OpenAI's models read. Ask a model for "
        "a summary of the conversation, and begin a new one with that",
        code="not_supported",
    )


class ResponseFailure(Struct, frozen=True):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class RawMessage(Struct, frozen=True, kw_only=True, tag="raw_message_tokens", tag_field="type"):
    """Prompt or output as the model reads and writes it (vLLM's `enable_response_messages`)."""

    message: str
    tokens: list[int]


class ResponseObject(Struct, frozen=True, kw_only=True):
    """Answer of /v1/responses; fields of the request are repeated as it gave them."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig
    safety_identifier: str | None = None
    service_tier: str = SERVICE_TIER
    store: bool
    temperature: float | None = None
    """That of the model's generation config, if the request gave none; likewise `top_p`."""
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float | None = None
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    input_messages: list[RawMessage] | msgspec.UnsetType = msgspec.UNSET
    output_messages: list[RawMessage] | msgspec.UnsetType = msgspec.UNSET
    """Both are left out unless the request asks for them."""


class DeletedResponse(Struct, frozen=True, kw_only=True):
    """Answer of DELETE /v1/responses/ID."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True, kw_only=True):
    """Answer of /v1/responses/ID/input_items."""

    object: str = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseState(Struct):
    """What is read of a stored response: whether it is over, and what the next turn continues."""

    id: str
    status: ResponseStatus
    created_at: float = 0
    background: bool = False
    output: list[ResponseItem] = []

    @property
    def is_finished(self) -> bool:
        return self.status in _FINISHED


def begun_response(
    request: ResponsesRequest,
    response_id: str,
    model: str,
    created_at: int,
    temperature: float | None,
    top_p: float | None,
) -> ResponseObject:
    """Return the response to a request before it has any output.

    Args:
        model: the name to answer with.
        temperature, top_p: what the model samples with; None if that is not known.
    """
    text = request.text or TextConfig()
    return ResponseObject(
        id=response_id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=request.background,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or ReasoningConfig(),
        safety_identifier=request.safety_identifier,
        store=request.store,
        temperature=temperature,
        text=TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity or "medium"),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=top_p,
        truncation=request.truncation,
        user=request.user,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )


def with_status(response: bytes, status: ResponseStatus, message: str = "") -> bytes:
    """Return a response, given as JSON, with another status; a failed one with an error that has a message."""
    fields = _decode_fields(response)
    fields["status"] = msgspec.Raw(msgspec.json.encode(status))
    if status == "failed":
        fields["error"] = msgspec.Raw(msgspec.json.encode(ResponseFailure("server_error", message)))
    return msgspec.json.encode(fields)
