"""MessageEvents: the events of a streamed message, in Anthropic's order.

    message_start, then for each content block content_block_start, its deltas and content_block_stop, at last
    message_delta with stop_reason and usage, and message_stop. One ping follows the first content_block_start.

The events of one output are made together, as bytes. Which tokens they stand for comes with the last one of them; so a
router that has only some of them knows that it cannot let another engine continue, except after message_delta, when
nothing is missing but message_stop.

Invariant: the text of blocks is a function of the token ids and the request. A resumed stream goes on in the block that
the client has open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from argosy_engine.api.anthropic.message_format import SIGNATURE, MessageFormat
from argosy_engine.api.id_comments import token_id_comment
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_protocol.anthropic import MESSAGE_STOP, ResumedMessage
from argosy_protocol.openai import ToolCall

_PING = b'event: ping\ndata: {"type":"ping"}'
_MESSAGE_START = b'event: message_start\ndata: {"type":"message_start","message":%b}'
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}'
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
)
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}'
_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"%b","stop_sequence":%b},'
    b'"usage":%b}'
)

_encode = msgspec.json.encode
_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_EMPTY = {_TEXT: b'{"type":"text","text":""}', _THINKING: b'{"type":"thinking","thinking":"","signature":""}'}
_DELTAS = {
    _TEXT: (b"text_delta", b"text"),
    _THINKING: (b"thinking_delta", b"thinking"),
    _TOOL_USE: (b"input_json_delta", b"partial_json"),
}


class MessageEvents:
    """
    Args:
        resume: the part that the client has; None for a stream that begins.
    """

    def __init__(self, message_format: MessageFormat, resume: ResumedMessage | None = None) -> None:
        self._format = message_format
        self._has_begun = resume is not None
        self._num_blocks = 0 if resume is None else resume.num_blocks
        self._open: str | None = None
        self._delta = b""
        """A delta of the open block up to its text: in most events only the text is new."""
        if resume is not None and resume.open_block is not None:
            self._set_open(resume.open_block)

    def of(self, output: GenerationOutput) -> list[bytes]:
        """Return the events that an output adds, each without the blank line after it."""
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(_MESSAGE_START % _encode(self._format.beginning(output)))
        delta = self._format.delta(output)
        calls = delta.tool_calls
        if calls and calls[0].id is None:
            events.append(b"%b%b}}" % (self._delta, _encode(calls[0].function.arguments)))
            calls = calls[1:]
        if delta.reasoning:
            self._add(events, _THINKING, delta.reasoning)
        if delta.content:
            self._add(events, _TEXT, delta.content)
        for call in calls:
            self._add_call(events, call)
        if output.finish_reason is not None:
            self._close(events)
            reason, sequence = self._format.stop(output)
            usage = self._format.usage(output, output.num_output_tokens)
            events.append(_END % (reason.encode(), _encode(sequence), _encode(usage)))
            events.append(MESSAGE_STOP.removesuffix(b"\n\n"))
        return events

    def _add(self, events: list[bytes], kind: str, text: str) -> None:
        if self._open != kind:
            self._begin(events, kind, _EMPTY[kind])
        events.append(b"%b%b}}" % (self._delta, _encode(text)))

    def _add_call(self, events: list[bytes], call: ToolCall) -> None:
        """Add a call as a block of its own, which is open while its arguments may go on."""
        block: dict[str, Any] = {"type": _TOOL_USE, "id": call.id, "name": call.function.name, "input": {}}
        self._begin(events, _TOOL_USE, _encode(block))
        if call.function.arguments:
            events.append(b"%b%b}}" % (self._delta, _encode(call.function.arguments)))

    def _begin(self, events: list[bytes], kind: str, block: bytes) -> None:
        self._close(events)
        events.append(_START % (self._num_blocks, block))
        self._num_blocks += 1
        if self._num_blocks == 1:
            events.append(_PING)
        self._set_open(kind)

    def _set_open(self, kind: str) -> None:
        self._open = kind
        self._delta = _DELTA % (self._num_blocks - 1, *_DELTAS[kind])

    def _close(self, events: list[bytes]) -> None:
        if self._open is None:
            return
        index = self._num_blocks - 1
        if self._open == _THINKING:
            signature = _DELTA % (index, b"signature_delta", b"signature")
            events.append(b"%b%b}}" % (signature, _encode(SIGNATURE)))
        events.append(_STOP % index)
        self._open = None


def with_id_comments(events: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
    """Join the events of one output, each with a comment of the token ids that the client has with it; the comment
    alone if there are no events."""
    if not events:
        return token_id_comment(0, token_ids)
    part = token_id_comment(0, ())
    lines = [b"%b\n%b" % (part, event) for event in events[:-1]]
    lines.append(b"%b\n%b" % (token_id_comment(0, token_ids), events[-1]))
    return b"\n\n".join(lines)
