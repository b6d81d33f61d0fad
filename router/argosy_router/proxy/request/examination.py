"""The reading of a request's body: checks it, and tells what routing must know of it.

Owns: which requests are refused for their content alone. It is pure: of large bodies another process does it
(`large_bodies`).
Must not know: services, accounts, connections.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from argosy_protocol.allowed_tools import ALLOWED_TOOLS
from argosy_protocol.anthropic import decode_count_tokens_request, decode_messages_request
from argosy_protocol.anthropic_chat import as_chat
from argosy_protocol.chat_batch import decode_batch_request
from argosy_protocol.embeddings import decode_embedding_request
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    Endpoint,
    InternalFields,
    decode_request,
)
from argosy_protocol.pooling import decode_classification_request, decode_pooling_request
from argosy_protocol.prompt_segments import Segment, prompt_segments
from argosy_protocol.responses import ResponsesRequest, decode_responses_request
from argosy_protocol.responses_chat import responses_as_chat
from argosy_protocol.scoring import decode_rerank_request, decode_score_request
from argosy_protocol.tokenization import only_model
from argosy_router.proxy.request.examined import Examined
from argosy_router.proxy.request.stream_shape import resumable_shape
from argosy_router.proxy.request.token_estimate import outputs_of

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
