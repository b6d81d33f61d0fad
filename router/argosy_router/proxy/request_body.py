"""A request's body: what is refused for its content, what routing must know of it, and what is rewritten in it.

It is pure, because another process does it for large bodies (`large_bodies`).
Must not know: services, accounts, limits, connections.

Bodies are rewritten field by field; all other fields keep their bytes. Engines of other makes get documented fields
only: OpenAI's and Anthropic's, and vLLM's and SGLang's for sampling, templates and output. Others may direct an engine
as its own router would: where to fetch a KV cache, which rank computes, which adapter to load, which session to
continue, which id to abort by. They are dropped, as engines themselves ignore fields they do not know; to refuse them
would break clients that send fields of other vendors. Fields known to be internal are refused by name
(`protocol.openai.InternalFields`). Of an endpoint whose requests the router does not decode in full, only the fields of
that endpoint pass, because the others were checked by nobody.

A request is charged to its key's limits before its answer: its prompts, and for each sequence its `max_tokens`, or what
the key's answers without one have taken on average. A batch has a sequence for each prompt, times `n`, or times the
beam width. If the answer is cut, the client pays for what was computed and gets the rest back: the prompts, and what
the replica can have generated at its rate since the expected first token, up to what was asked for. Of a stream, what
was sent counts, and what can have been generated since the last event: an engine may tell nothing for thousands of
tokens (`stream_interval`, reasoning that is not shown).

Only some streams can be continued by another replica. Token ids do not tell how to continue a beam search, nor n > 1
with `echo` and `logprobs`, where a choice's first chunk repeats what only the first choice computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from argosy_protocol.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    as_chat,
    decode_count_tokens_request,
    decode_messages_request,
)
from argosy_protocol.chunk_hash import Segment, prompt_segments
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import (
    ALLOWED_TOOLS,
    MAX_TOKENS,
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    Endpoint,
    InternalFields,
    StreamOptions,
    decode_batch_request,
    decode_request,
    only_model,
)
from argosy_protocol.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    decode_classification_request,
    decode_embedding_request,
    decode_pooling_request,
    decode_rerank_request,
    decode_score_request,
)
from argosy_protocol.responses import ResponsesRequest, decode_responses_request
from argosy_protocol.responses_chat import responses_as_chat
from argosy_router.proxy.decoded_types import Examined, Outputs, StreamShape

LARGE_BODY_BYTES: Final = 1 << 20
"""Bodies above this size are large. Reading a smaller one takes a few milliseconds."""
_MANY_VALUES: Final = 8192
"""Commas of a body that is large, whatever its size: reading takes a microsecond for an empty part of a message."""


def takes_long(body: bytes) -> bool:
    """Whether reading a body would hold up other requests, whoever sends it: by its size, or because it may have many
    values (commas in texts count, too)."""
    return len(body) > LARGE_BODY_BYTES or body.count(b",") > _MANY_VALUES


def resumable_shape(
    request: ChatCompletionRequest | CompletionRequest, *, is_message: bool = False
) -> StreamShape | None:
    """Return the shape of the stream that answers `request`; None if it is no stream or cannot be continued.

    Args:
        is_message: `request` is the chat that a Messages request stands for.

    Raises:
        BadRequest: the prompts of a batch are of different kinds, or too many.
    """
    if not request.stream or request.use_beam_search:
        return None
    choices = request.n or 1
    has_echo = False
    if isinstance(request, CompletionRequest):
        has_echo = request.echo
        if choices > 1 and request.echo and request.logprobs is not None:
            return None
        choices *= len(request.prompts())
    options = request.stream_options
    return StreamShape(choices, options is not None and options.include_usage, has_echo, is_message)


class TokenEstimate:
    """The tokens that one request is expected to take."""

    def __init__(
        self,
        outputs: Outputs,
        prompt_tokens: int,
        usual_output_tokens: float,
        *,
        service_prompt_tokens: int | None = None,
    ) -> None:
        """
        Args:
            usual_output_tokens: of an answer without a limit.
            service_prompt_tokens: the same as `prompt_tokens` if None.
        """
        self.prompt_tokens = prompt_tokens
        """Tokens of all prompts together, by what the key's prompts usually have: for its limits."""
        self.service_prompt_tokens = prompt_tokens if service_prompt_tokens is None else service_prompt_tokens
        """The same by what all prompts of the service usually have: for comparison with those of other keys."""
        self.sequences = outputs.sequences
        """Sequences generated in parallel."""
        self.output_tokens = int(usual_output_tokens) if outputs.limit is None else outputs.limit
        """Expected output tokens of each sequence."""
        self.has_limit = outputs.limit is not None
        """Whether the request bounds its output."""
        self.beams_per_choice = outputs.beams_per_choice
        """Sequences computed for each that is returned."""

    @property
    def total(self) -> int:
        """Tokens to reserve."""
        return self.prompt_tokens + self.sequences * self.output_tokens

    @property
    def cost(self) -> int:
        """Tokens that the request costs the service, in the measure of all keys."""
        return self.service_prompt_tokens + self.sequences * self.output_tokens

    def used(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the tokens that an answer with this usage counts for."""
        return prompt_tokens + int(completion_tokens * self.beams_per_choice)

    def generated_in(self, seconds: float, decode_step_s: float, max_tokens: int = MAX_TOKENS) -> int:
        """Return the tokens charged for a request that reported no usage and generated for `seconds`: at most
        `max_tokens` for each sequence. `seconds` is not positive before its first token."""
        if seconds <= 0.0:
            return self.prompt_tokens
        bound = self._bound(max_tokens)
        return self.prompt_tokens + self.sequences * min(bound, int(seconds / decode_step_s))

    def unsent_in(
        self, seconds: float, decode_step_s: float, sent: int, max_unsent: int, max_tokens: int = MAX_TOKENS
    ) -> int:
        """Return the tokens that a replica can have generated in the `seconds` since the last event of a stream.

        Args:
            sent: tokens of all sequences up to then.
            max_unsent: tokens of each sequence that the replica may have kept back.
            max_tokens: of each sequence at most.
        """
        left = max(0, self._bound(max_tokens) - sent // self.sequences)
        return self.sequences * min(left, max_unsent, int(max(0.0, seconds) / decode_step_s))

    def _bound(self, max_tokens: int) -> int:
        """Tokens of a sequence, where `max_tokens` is a replica's word: a negative one would return tokens to a key."""
        return max(0, min(self.output_tokens, max_tokens) if self.has_limit else max_tokens)


def outputs_of(request: ChatCompletionRequest | CompletionRequest) -> Outputs:
    """Return what a request asks to generate.

    Raises:
        BadRequest: the prompts of a batch are of different kinds, or too many.
    """
    choices = width = request.n or 1
    prompts = 1
    limit = request.max_tokens
    if isinstance(request, CompletionRequest):
        prompts = max(1, len(request.prompts()))
        if request.best_of is not None:
            width = max(width, request.best_of)
    else:
        limit = request.max_completion_tokens or limit
        if isinstance(request, BatchChatCompletionRequest):
            prompts = len(request.messages)
    return Outputs(prompts * width, limit, width / choices)


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_fields(body: bytes, changes: Mapping[str, str | int | StreamOptions | msgspec.Raw]) -> bytes:
    """Return `body` with other values of some fields.

    A key given twice keeps its last value, which is what every JSON decoder on the way reads.
    """
    fields = _fields.decode(body)
    for name, value in changes.items():
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


def with_another(body: bytes, field: bytes) -> bytes:
    """Append a field, given as JSON (`"name":value`), to `body`, which must not be an empty object.

    Nothing is decoded for this. If `body` has a field of that name already, as null, the last one counts.
    """
    return b"".join((memoryview(body)[: body.rindex(b"}")], b",", field, b"}"))


_OPENAI: Final = frozenset(
    (
        *("best_of", "echo", "frequency_penalty", "function_call", "functions"),
        *("logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "metadata"),
        *("modalities", "model", "n", "parallel_tool_calls", "prediction", "presence_penalty", "prompt"),
        *("prompt_cache_key", "reasoning_effort", "response_format", "safety_identifier", "seed"),
        *(
            "service_tier",
            "stop",
            "store",
            "stream",
            "stream_options",
            "suffix",
            "temperature",
            "tool_choice",
        ),
        *("tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options"),
    )
)
_VLLM: Final = frozenset(
    (
        *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt"),
        *("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "guided_choice"),
        *("guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"),
        *("guided_whitespace_pattern", "ignore_eos", "include_reasoning", "include_stop_str_in_output"),
        *("length_penalty", "logprob_token_ids", "min_p", "min_tokens", "mm_processor_kwargs"),
        *("priority", "prompt_logprobs", "repetition_detection", "repetition_penalty", "return_prompt_text"),
        *("return_token_ids", "return_token_offsets", "return_token_strs", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "stream_interval"),
        *("structural_tag", "structured_outputs", "thinking_token_budget", "top_k"),
        *("truncate_prompt_tokens", "truncation_side", "use_beam_search"),
    )
)
"""Not among them: `prompt_embeds` (a pickled tensor), `media_io_kwargs` (options of decoders), `request_id`."""
_SGLANG: Final = frozenset(
    (
        *("ebnf", "json_schema", "no_stop_trim", "reasoning", "regex", "return_prompt_token_ids"),
        *("separate_reasoning", "stop_regex", "stream_reasoning", "task"),
    )
)
"""Not among them: `input_ids` of a chat (the router could not tell its prefix), `extra_key`, `rid`, `session_id`, and
what makes answers large (`return_hidden_states`, `return_routed_experts`)."""
_NEVER_FOREIGN: Final = frozenset(
    (
        *(*InternalFields.__struct_fields__, "data_parallel_rank", "resume"),
        *("mcp_servers", "container", "context_management"),  # refused if they ask for something
    )
)
_OWN: Final = frozenset(("background", "previous_response_id", "request_id", "session_id"))
"""What the router keeps or names itself: the state of responses, sessions and requests."""
_GENERATION: Final = _OPENAI | _VLLM | _SGLANG | {"vllm_xargs"}
_POOLING: Final = {
    "embeddings": EmbeddingRequest,
    "classify": ClassificationRequest,
    "pooling": PoolingRequest,
    "score": ScoreRequest,
    "rerank": RerankRequest,
}
_OTHER_NAMES: Final = frozenset(("data_1", "data_2", "normalize", "text_1", "text_2"))
"""Names that other versions of vLLM and other servers have for fields of ours."""
_TOKENIZE: Final = frozenset(
    (
        *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
        *("continue_final_message", "messages", "mm_processor_kwargs", "model", "prompt", "reasoning_effort"),
        *("return_token_strs", "tools"),
    )
)
_FIELDS: Final = {
    "chat/completions": _GENERATION,
    "chat/completions/batch": _GENERATION,
    "completions": _GENERATION,
    **{
        endpoint: frozenset(request.__struct_encode_fields__) - _NEVER_FOREIGN - _OWN | _OTHER_NAMES
        for endpoint, request in _POOLING.items()
    },
    "messages": frozenset(MessagesRequest.__struct_encode_fields__) - _NEVER_FOREIGN,
    "messages/count_tokens": frozenset(CountTokensRequest.__struct_encode_fields__) - _NEVER_FOREIGN,
    "responses": frozenset(ResponsesRequest.__struct_encode_fields__) - _NEVER_FOREIGN - _OWN,
    "responses/input_tokens": frozenset(ResponsesRequest.__struct_encode_fields__) - _NEVER_FOREIGN - _OWN,
    "tokenize": _TOKENIZE,
    "detokenize": frozenset(("model", "tokens")),
}
"""By endpoint. `vllm_xargs` reach an engine's connectors of KV caches too, so that they pass only where their names are
checked."""


def keep_foreign_fields(body: bytes, endpoint: str) -> bytes:
    """Return the JSON object `body` with foreign engines' fields of `endpoint` only, unchanged if it has no others."""
    known = _FIELDS[endpoint]
    fields = _fields.decode(body)
    if known.issuperset(fields):
        return body
    return msgspec.json.encode({name: value for name, value in fields.items() if name in known})


RoutedEndpoint = (
    Endpoint
    | Literal["chat/completions/batch", "embeddings", "classify", "pooling", "score", "rerank"]
    | Literal["messages", "messages/count_tokens", "responses", "responses/input_tokens"]
    | Literal["tokenize", "detokenize"]
)

_INTERNAL: Final = frozenset((*InternalFields.__struct_fields__, "data_parallel_rank"))
_ALLOWED_TOOLS: Final = ALLOWED_TOOLS.encode()
_WITHOUT_STORAGE: Final = {
    "background": "wait for the answer, or stream it",
    "previous_response_id": "send the whole conversation as input",
}
"""Fields of responses that a router without a storage refuses -> what to do instead."""


def examine(
    endpoint: RoutedEndpoint, body: bytes, *, has_state: bool
) -> tuple[Examined, list[list[Segment]]]:
    """Read a body; return the facts and the prompts.

    Args:
        has_state: whether the router stores the response that is asked for.

    Raises:
        BadRequest: not JSON, wrong types, out of bounds, or a field that only engines and routers may use.
        PayloadTooLarge: it has too many values.
    """
    try:
        return _examine(endpoint, body, has_state=has_state)
    except RecursionError:
        raise BadRequest("the request is nested too deeply") from None


def _examine(
    endpoint: RoutedEndpoint, body: bytes, *, has_state: bool
) -> tuple[Examined, list[list[Segment]]]:
    try:
        decoded = _decode(endpoint, body, has_state=has_state)
    except BadRequest as error:
        named = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
        if named == "resume" or named in _INTERNAL:
            raise _internal(named) from None
        raise
    if decoded.resume is not None:
        raise _internal("resume")
    if decoded.data_parallel_rank is not None:  # the router's balance rests on the engine's choice
        raise _internal("data_parallel_rank")
    if decoded.vllm_xargs and not _INTERNAL.isdisjoint(decoded.vllm_xargs):
        raise BadRequest("vllm_xargs has a field that is internal to engines", param="vllm_xargs")
    tool_choice: str | None = None
    tools = b""
    if (
        endpoint in ("chat/completions", "chat/completions/batch")
        and _ALLOWED_TOOLS in body
        and isinstance(decoded, ChatCompletionRequest)
        and decoded.tools
        and decoded.tool_choice in ("auto", "required")
    ):  # vLLM does not know allowed_tools
        tool_choice, tools = str(decoded.tool_choice), msgspec.json.encode(decoded.tools)
    is_response = endpoint in ("responses", "responses/input_tokens")
    facts = Examined(
        model=decoded.model,
        request_id=decoded.request_id,
        session=declared_session(decoded),
        priority=decoded.priority,
        cache_salt=decoded.cache_salt,
        stream=decoded.stream,
        stream_options=decoded.stream_options,
        stream_interval=decoded.stream_interval or 1,
        outputs=outputs_of(decoded),
        shape=None if is_response else resumable_shape(decoded, is_message=endpoint == "messages"),
        is_cut=decoded.truncate_prompt_tokens is not None,
        tool_choice=tool_choice,
        tools=tools,
    )
    return facts, prompt_segments(decoded)


def declared_session(decoded: ChatCompletionRequest | CompletionRequest) -> str:
    """Return the session that a body declares, empty for none."""
    return decoded.prompt_cache_key or decoded.session_id or ""


def _internal(field: str) -> BadRequest:
    return BadRequest(f"{field} is internal to engines and refused from clients", param=field)


def _decode(
    endpoint: RoutedEndpoint, body: bytes, *, has_state: bool
) -> ChatCompletionRequest | CompletionRequest:
    if endpoint == "embeddings":
        return decode_embedding_request(body).as_generation()
    if endpoint == "classify":
        return decode_classification_request(body).as_generation()
    if endpoint == "pooling":
        return decode_pooling_request(body).as_generation()
    if endpoint == "score":
        return decode_score_request(body).as_completion()
    if endpoint == "rerank":
        return decode_rerank_request(body).as_completion()
    if endpoint == "chat/completions/batch":
        return decode_batch_request(body)
    if endpoint in ("chat/completions", "completions"):
        return decode_request(endpoint, body)
    if endpoint == "messages":
        return as_chat(decode_messages_request(body))
    if endpoint == "responses":
        asked = decode_responses_request(body)
        return responses_as_chat(asked if has_state else _stateless(asked))
    if endpoint == "responses/input_tokens":
        asked = decode_responses_request(body)
        if not has_state:
            _stateless(asked)
        return ChatCompletionRequest(
            messages=[], model=asked.model, max_tokens=0, cache_salt=asked.cache_salt, priority=asked.priority
        )
    if endpoint == "messages/count_tokens":
        model = decode_count_tokens_request(body).model
        return ChatCompletionRequest(messages=[], model=model, max_tokens=0)  # nothing is computed or cached
    return only_model(body)


def _stateless(request: ResponsesRequest) -> ResponsesRequest:
    """Refuse what needs stored responses."""
    for field, remedy in _WITHOUT_STORAGE.items():
        if getattr(request, field):
            raise BadRequest(
                f"{field} needs stored responses, which a router has with --batch-url, but not for requests of "
                f"batches; {remedy}",
                param=field,
            )
    return request
