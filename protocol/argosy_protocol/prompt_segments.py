"""The fields of a request that determine its prompt, in prompt order, as byte segments.

Router and engine call the pure function `prompt_segments` on the decoded request, so the result depends on the values,
not on how a client serialised its JSON. It needs neither tokenizer nor chat template.

Order: tools, documents, template arguments, then for each message: role, name, reasoning, text parts (or a digest of
each part that is not text), tool calls, tool call id. For every template that renders in this order, two requests whose
segments agree up to some byte have prompts that agree up to the tokens of that byte; for other templates, the engine's
mapping (`frontend.chunk_map`) rounds down. A chain is a hint for routing: a wrong one only costs speed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec
import xxhash

from argosy_protocol.chat_batch import BatchChatCompletionRequest
from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest


class SegmentKind(IntEnum):
    """Kind of a segment, mixed into its chunk hashes, so that equal bytes of different kinds do not collide."""

    TEXT = 0
    TOKENS = 1
    """little-endian int32 token ids"""
    TOOLS = 2
    DOCUMENT = 3
    TEMPLATE = 4
    ROLE = 5
    NAME = 6
    DIGEST = 7
    """xxh3-128 of a part that is not text"""
    TOOL_CALLS = 8
    TOOL_CALL_ID = 9
    REASONING = 10


Segment = tuple[SegmentKind, bytes]
"""A plain tuple: routers create two or more per message for every request, and a named tuple takes eight times as long
to create."""

_encoder = msgspec.json.Encoder(order="deterministic")


def prompt_segments(request: ChatCompletionRequest | CompletionRequest) -> list[list[Segment]]:
    """Return one list of segments per prompt of the request: one of a chat, several of completions and batches.

    Raises:
        BadRequest: a completion's `prompt` mixes texts and token ids.
    """
    if isinstance(request, CompletionRequest):
        return [[_prompt_segment(prompt)] for prompt in request.prompts()]
    if isinstance(request, BatchChatCompletionRequest):
        return [_chat_segments(chat) for chat in request.chats()]
    return [_chat_segments(request)]


def _prompt_segment(prompt: str | list[int]) -> Segment:
    if isinstance(prompt, str):
        return (SegmentKind.TEXT, prompt.encode("utf-8", "surrogatepass"))
    return (SegmentKind.TOKENS, struct.pack(f"<{len(prompt)}i", *prompt))


def _chat_segments(request: ChatCompletionRequest) -> list[Segment]:
    segments: list[Segment] = []
    add = segments.append
    for tool in request.tools or ():
        add((SegmentKind.TOOLS, _encoder.encode(tool)))
    for document in request.documents or ():
        add((SegmentKind.DOCUMENT, _encoder.encode(document)))
    template_arguments: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        template_arguments["reasoning_effort"] = request.reasoning_effort
    if request.chat_template is not None:
        template_arguments["chat_template"] = request.chat_template
    if template_arguments:
        add((SegmentKind.TEMPLATE, _encoder.encode(template_arguments)))
    for message in request.messages:
        add((SegmentKind.ROLE, message.role.encode()))
        if message.name is not None:
            add((SegmentKind.NAME, message.name.encode("utf-8", "surrogatepass")))
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if reasoning:
            add((SegmentKind.REASONING, reasoning.encode("utf-8", "surrogatepass")))
        content = message.content
        if isinstance(content, str):
            add((SegmentKind.TEXT, content.encode("utf-8", "surrogatepass")))
        elif content is not None:
            for part in content:
                add(_part_segment(part))
        if not content and message.refusal:
            add((SegmentKind.TEXT, message.refusal.encode("utf-8", "surrogatepass")))
        if message.tool_calls:
            add((SegmentKind.TOOL_CALLS, _encoder.encode(message.tool_calls)))
        elif message.function_call:
            add((SegmentKind.TOOL_CALLS, _encoder.encode(message.function_call)))
        if message.tool_call_id is not None:
            add((SegmentKind.TOOL_CALL_ID, message.tool_call_id.encode("utf-8", "surrogatepass")))
    return segments


def _part_segment(part: Mapping[str, Any]) -> Segment:
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return (SegmentKind.TEXT, text.encode("utf-8", "surrogatepass"))
    return (SegmentKind.DIGEST, xxhash.xxh3_128_digest(_encoder.encode(part)))
