"""Prompt segments and their chunk hashes, by which engine and router identify cached prefixes.

`prompt_segments` gives the fields of a request that determine its prompt, in prompt order. It is a pure function of the
decoded request, so the result depends on the values, not on how a client serialised its JSON, and needs neither
tokenizer nor chat template. Order: tools, documents, template arguments, then for each message: role, name, reasoning,
text parts (or a digest of each part that is not text), tool calls, tool call id. For every template that renders in
this order, two requests whose segments agree up to some byte have prompts that agree up to the tokens of that byte; for
other templates, the engine's mapping (`frontend.prompts`) rounds down. A chain is a hint for routing: a wrong one
only costs speed.

Segments are split into chunks of `CHUNK_BYTES`; a segment's end always ends its last chunk. Deep inside a long segment
chunks grow with the offset: from `COARSE_BYTES` on their size doubles whenever the offset does. There, a chunk is at
most a 32nd of the prefix that it completes, and 100 KiB in a segment have 146 hashes, not 400. Each hash covers
everything before its chunk, so that one 64-bit number identifies a whole prefix:

    seed = xxh3_64(len|model, len|adapter, len|adapter version, len|cache_salt)
    h_i  = xxh3_64(chunk_i, seed = h_{i-1} ^ KIND_MIX * (kind + 1))

where model is the canonical name. By construction, prompts of different salts or adapters share no prefix. 64 bits
suffice for a hint: a collision sends a request to a replica that must compute its prompt after all.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import xxhash

from argosy_protocol.openai import BatchChatCompletionRequest, ChatCompletionRequest, CompletionRequest
from argosy_protocol.skipped_content import OR_NOTE


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
    for field in ("chat_template", "mm_processor_kwargs", "media_io_kwargs"):
        if (value := getattr(request, field)) is not None:
            template_arguments[field] = value
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
    if OR_NOTE in part:  # which depends on what comes after it
        part = {name: value for name, value in part.items() if name != OR_NOTE}
    return (SegmentKind.DIGEST, xxhash.xxh3_128_digest(_encoder.encode(part)))


CHUNK_BYTES = 256
"""About 64 to 90 tokens of English: small enough to detect a shared system prompt, large enough that an 8 KB prompt has
only 32 hashes."""
COARSE_BYTES = 64 * CHUNK_BYTES
"""Offset in a segment from which chunks have twice `CHUNK_BYTES`; from twice this offset four times, and so on."""

_KIND_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_xxh3 = xxhash.xxh3_64_intdigest


def chain_seed(model: str, adapter: str = "", adapter_version: str = "", cache_salt: str = "") -> int:
    """Seed of the chains of one model, adapter and salt. `model` is the service's canonical served name."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (model, adapter, adapter_version, cache_salt)]
    return _xxh3(b"".join(struct.pack("<I", len(part)) + part for part in parts))


def chunk_hashes(segments: Sequence[Segment], seed: int) -> array[int]:
    """Hash the chunks of one prompt, in prompt order, as `array("Q")`."""
    hashes: list[int] = []
    add = hashes.append
    previous = seed
    for kind, data in segments:
        mix = (_KIND_MIX * (kind + 1)) & _MASK
        size = len(data)
        if size <= CHUNK_BYTES:
            previous = _xxh3(data, previous ^ mix)
            add(previous)
            continue
        start, step, until = 0, CHUNK_BYTES, COARSE_BYTES
        while start < size:
            for begin in range(start, min(size, until), step):
                previous = _xxh3(data[begin : begin + step], previous ^ mix)
                add(previous)
            start, step, until = until, step * 2, until * 2
    return array("Q", hashes)


def chunk_offsets(sizes: Iterable[int]) -> list[int]:
    """For each chunk of `chunk_hashes`, the prompt bytes up to and including it. `sizes` are those of the segments."""
    offsets: list[int] = []
    base = 0
    for size in sizes:
        if size > CHUNK_BYTES:
            offsets.extend(base + end for end in _inner_ends(size))
        base += size
        offsets.append(base)
    return offsets


def chunk_ends(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """For each chunk of `chunk_hashes`, `(index of its segment, byte offset of its end inside the segment)`."""
    ends: list[tuple[int, int]] = []
    for index, (_, data) in enumerate(segments):
        size = len(data)
        ends.extend((index, end) for end in _inner_ends(size))
        ends.append((index, size))
    return ends


def _inner_ends(size: int) -> Iterator[int]:
    """Ends of a segment's chunks except the last."""
    start, step, until = 0, CHUNK_BYTES, COARSE_BYTES
    while start < size:
        yield from range(start + step, min(size, until + 1), step)
        start, step, until = until, step * 2, until * 2
