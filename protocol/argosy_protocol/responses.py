"""Wire types of OpenAI's /v1/responses, with the extra fields of vLLM's: requests, then answers.

Router and engine decode the same bytes with the same decoder, and `responses_chat` makes the same chat of them.
Decoding is as strict as that of chats (`openai`): every field has a bound, null counts as absent, unknown fields are
ignored. An item of the input is one struct for all its types, because new types appear faster than schemas;
`responses_chat` skips those that a model cannot read.

An id tells to which response an item belongs: `resp_ID` has the output items `msg_ID_0`, `rs_ID_1` and so on, and the
input items `msg_ID_i0` and so on (`response_history` resolves references by it).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import Nullable, NullDefaults, Steps, decoding_body, done
from argosy_protocol.openai import (
    MAX_MESSAGES,
    MAX_TOKENS,
    LogprobCount,
    ReasoningEffort,
    SamplingFields,
    TokenLogprob,
)
from argosy_protocol.skipped_content import FIELDS, MAX_UNREADABLE, RAWS, can_decode, only_type

PATH = "/v1/responses"
MAX_ITEMS = MAX_MESSAGES
"""Items of one input, and of a conversation with all its previous responses."""
MAX_PARTS = 1024
"""Content parts of one item."""
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log probabilities."""

ResponseId = Annotated[str, Meta(min_length=1, max_length=256)]
_Word = Annotated[str, Meta(max_length=256)]
_MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponseContentPart(Struct, kw_only=True, omit_defaults=True):
    """One part of an item's content, with the fields of the types we read or pass on."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: _Word | None = None
    file_data: str | None = None
    file_id: _Word | None = None
    filename: _Word | None = None


_Parts = Annotated[list[ResponseContentPart], Meta(max_length=MAX_PARTS)]


class ResponseItem(Struct, kw_only=True, omit_defaults=True):
    """One item of a conversation, with the fields of the types that we read (`READ_ITEMS`)."""

    type: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """Absent: a message, or a reference if there is nothing but an id."""
    id: ResponseId | None = None
    status: Annotated[str, Meta(max_length=32)] | None = None
    role: Annotated[str, Meta(max_length=64)] | None = None
    content: str | _Parts | None = None
    summary: _Parts | None = None
    encrypted_content: str | None = None
    call_id: _Word | None = None
    name: _Word | None = None
    namespace: _Word | None = None
    arguments: Any = None
    """Of a function: a text. Of a search for tools: any value."""
    input: str | None = None
    """Of a custom tool."""
    output: Any = None
    """Of a function: a text, or parts of type input_text. Other types have what they like."""
    execution: _Word | None = None
    action: Any = None
    """Of a local shell: the command, and how to run it."""
    author: _Word | None = None
    recipient: _Word | None = None
    tools: Any = None
    """Tools that the conversation adds to those of the request. Read leniently: they are sent with the history."""

    @property
    def kind(self) -> str:
        """The type, also of an item that does not say it."""
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.content is None and self.id else "message"


READ_ITEMS = frozenset(
    (
        *("additional_tools", "agent_message", "custom_tool_call", "custom_tool_call_output"),
        *("function_call", "function_call_output", "item_reference", "local_shell_call"),
        *("local_shell_call_output", "message", "reasoning", "tool_search_call", "tool_search_output"),
    )
)
"""Types of items that say something to a model, or refer to one that does."""
TEXT_PARTS = frozenset(("input_text", "output_text", "refusal", "text"))
"""Types of content parts that a model reads."""
Items = Annotated[list[ResponseItem], Meta(max_length=MAX_ITEMS)]


class ResponseTool(Struct, kw_only=True):
    """A tool of the client's, or a namespace of some. Every other type is a tool of OpenAI's own servers."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = UNSET
    """Of a custom tool: the grammar of its input, which the model is told of."""
    execution: Any = UNSET
    """Of a search for tools: whether the client does it."""
    tools: Any = UNSET
    """Of a namespace: its functions and custom tools."""


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.type != "json_schema":
            return
        for field in ("name", "schema"):
            if getattr(self, field) is None:
                where = f"text.format.{field}"
                raise BadRequest(f"{where} is required of the type json_schema", param=where)


class TextConfig(Struct, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect: a hint for models that were trained on it."""


class ReasoningConfig(Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """OpenAI's old name of `summary`."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Of which turns the model sees the reasoning: its chat template decides."""
    mode: _Word | None = None


class ResponseStreamOptions(NullDefaults, kw_only=True, omit_defaults=True):
    include_obfuscation: Nullable[bool] = False


class ResponsesRequest(SamplingFields, kw_only=True, omit_defaults=True):
    """Body of /v1/responses. `None` stands for the model's generation config."""

    input: str | Items
    instructions: str | None = None
    stream_options: ResponseStreamOptions | None = None
    store: Nullable[bool] = True
    background: Nullable[bool] = False
    previous_response_id: ResponseId | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    """Bounds calls of tools that the server runs, and ours runs none."""
    top_logprobs: LogprobCount | None = None
    """Of the log probabilities that `include` asks for; without them it has no effect."""
    include: (
        Annotated[
            list[
                Literal[
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "web_search_call.action.sources",
                    "web_search_call.results",
                ]
            ],
            Meta(max_length=64),
        ]
        | None
    ) = None
    """All but log probabilities are parts of items that our answers do not have."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Nullable[bool] = True
    truncation: Nullable[Literal["auto", "disabled"]] = "disabled"
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    """There is one tier, and answers say so."""
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    """Prefixes stay in the cache while there is room, whatever this says."""
    prompt_cache_options: dict[str, Any] | None = None
    """As `prompt_cache_retention`."""
    context_management: Any = None
    """When to compact a conversation. Without effect: only clients do that."""
    # vLLM's extra fields
    include_reasoning: Nullable[bool] = True
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: Nullable[bool] = False
    """vLLM's field: the answer has the text and the tokens of prompt and output."""
    data_parallel_rank: None = None
    """Only the header tells an engine the rank."""
    # Decoded only to be refused: ignoring them would change the answer.
    access_programs: Any = None
    background_options: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    previous_input_messages: Any = None
    watermarking: Any = None
    # Fields of chats that have another name here, decoded only to be refused with it.
    max_tokens: Any = None
    max_completion_tokens: Any = None
    messages: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    functions: Any = None
    n: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in REFUSED_FIELDS:
            if getattr(self, field):
                raise BadRequest(f"{field} is not supported", param=field)
        for field, name in NAMES_OF_CHAT_FIELDS.items():
            if getattr(self, field) is not None:
                raise BadRequest(f"{field} is a field of chats; responses have {name}", param=field)
        if self.n not in (None, 1):
            raise BadRequest("n is a field of chats; there is one response to a request", param="n")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", param="stream_options")
        if self.background and not self.store:
            raise BadRequest("background can only be used when `store` is true", param="background")
        options = self.stream_options
        if options is not None and options.include_obfuscation:
            where = "stream_options.include_obfuscation"
            raise BadRequest(f"{where} is not supported", param=where)
        self._check_configs()

    def _check_configs(self) -> None:
        reasoning = self.reasoning
        if reasoning is not None and reasoning.mode not in (None, "standard"):
            raise BadRequest(
                f"reasoning.mode: {reasoning.mode!r} is not supported by this model; give 'standard'",
                param="reasoning.mode",
            )

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer's text comes with log probabilities."""
        return self.include is not None and LOGPROBS in self.include


REFUSED_FIELDS = (
    *("access_programs", "background_options", "conversation", "image", "moderation"),
    *("prompt", "media_io_kwargs", "mm_processor_kwargs", "previous_input_messages", "watermarking"),
)
"""Fields that are refused unless they ask for nothing."""

NAMES_OF_CHAT_FIELDS = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
}
"""Fields of chats that responses have under another name."""

_REQUEST = msgspec.json.Decoder(ResponsesRequest)


def decode_responses_request(body: bytes) -> ResponsesRequest:
    """Decode a body of /v1/responses.

    Raises:
        BadRequest: not JSON, nested too deeply, wrong types or out of bounds, a field that is refused, or fields that
            contradict each other; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return done(decoding_responses_request(body))


def decoding_responses_request(body: bytes) -> Steps[ResponsesRequest]:
    """`decode_responses_request` in steps, for a large body."""
    try:
        return (yield from decoding_body(_REQUEST, body))
    except BadRequest as error:
        if not (error.param or "").startswith("input["):
            raise
        fault = error
    try:
        readable = yield from _with_readable_items(body)
        if readable is None:
            raise fault
    finally:
        del fault  # it refers to this frame, and so to the body
    yield
    return (yield from decoding_body(_REQUEST, readable))


_STEP_BYTES = 16 * 1024
"""Of items that are looked at one by one between two steps: of empty parts some five thousand."""
_ITEM = msgspec.json.Decoder(ResponseItem)
_PART = msgspec.json.Decoder(ResponseContentPart)


def _with_readable_items(body: bytes) -> Steps[bytes | None]:
    """Return, in steps, a body with only the type of each item that is none of `READ_ITEMS`, and of each content part
    that is none of `TEXT_PARTS`, and has fields of other types than ours; None if that does not make it readable.

    An id that is none of ours is left out of other items: nothing refers to it.
    """
    try:
        fields = FIELDS.decode(body)
        given = RAWS.decode(fields["input"])
        if len(given) > MAX_ITEMS:
            return None
        num_replaced = step = 0
        items = []
        for item in given:
            step += len(item)
            if step >= _STEP_BYTES:
                step = 0
                yield
            readable, replaced = _readable_item(item)
            num_replaced += replaced
            if num_replaced > MAX_UNREADABLE:
                return None
            items.append(readable)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return msgspec.json.encode({**fields, "input": items})


def _readable_item(item: msgspec.Raw) -> tuple[msgspec.Raw, int]:
    """Return an item, and how many of its parts were replaced."""
    if can_decode(_ITEM, item):
        return item, 0
    if (only := only_type(item, READ_ITEMS)) is not None:
        return only, 0
    fields: dict[str, Any] = FIELDS.decode(item)
    replaced = 0
    for field in ("content", "summary"):
        content = fields.get(field)
        parts = RAWS.decode(content) if content is not None and bytes(content)[:1] == b"[" else []
        if 0 < len(parts) <= MAX_PARTS:
            fields[field] = [_readable_part(part) for part in parts]
            replaced += sum(read is not part for read, part in zip(fields[field], parts, strict=True))
    readable = msgspec.Raw(msgspec.json.encode(fields))
    if "id" in fields and not can_decode(_ITEM, readable):
        del fields["id"]
        readable = msgspec.Raw(msgspec.json.encode(fields))
    return readable, replaced


def _readable_part(part: msgspec.Raw) -> msgspec.Raw:
    return part if can_decode(_PART, part) else only_type(part, TEXT_PARTS) or part


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


class ResponseProgress(Struct):
    """What is read of a stored response to know whether it is over. Its output may be a million items."""

    id: str
    status: ResponseStatus
    created_at: float = 0
    background: bool = False

    @property
    def is_finished(self) -> bool:
        return self.status in _FINISHED


class ResponseState(ResponseProgress):
    """The same, with what the next turn continues."""

    output: list[ResponseItem] = []


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
