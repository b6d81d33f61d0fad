"""Message transcript: what the client has of a stream of Anthropic's API.

Owns: which events of such a stream tell how another replica continues it. Must not know: what `stream_transcript` must
not know.
Invariant: an engine makes several events of one output, and only the last one of them has its token ids. A client that
was sent some of them only cannot be continued for, except after `message_delta`, when nothing is missing but the last
event.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from argosy_protocol.anthropic import MESSAGE_STOP, ResumedMessage
from argosy_protocol.headers import ID_COMMENT
from argosy_router.proxy.request.stream_shape import StreamShape
from argosy_router.proxy.upstream.stream_event import BlockType, decode_block_start
from argosy_router.proxy.upstream.stream_transcript import Transcript

_WITHOUT_STATE = frozenset((b"message_start", b"content_block_delta", b"ping"))


class MessageTranscript(Transcript):
    """The part of one streamed message that the client was sent."""

    error_mark: ClassVar[bytes] = b"event: error\ndata: "
    unavailable_mark: ClassVar[bytes] = b'"type":"overloaded_error"'

    __slots__ = ("_has_half_output", "_is_complete", "_num_blocks", "_open_block")

    def __init__(self, shape: StreamShape) -> None:
        super().__init__(shape)
        self._num_blocks = 0
        self._open_block: BlockType | None = None
        """Type of the content block that has begun and not ended."""
        self._is_complete = False
        """Whether only the last event is missing."""
        self._has_half_output = False
        """Whether the last event was not the last one of an output."""

    def is_end(self, events: bytes) -> bool:
        return events.endswith(MESSAGE_STOP) or events.rfind(self.error_mark) >= 0

    def read(self) -> bool:
        return super().read() and (self._is_complete or not self._has_half_output)

    def _read_event(self, event: bytes) -> None:
        if event.startswith(ID_COMMENT):
            comment, _, event = event.partition(b"\n")
            before = self.num_tokens
            self._read_comment(comment)
            self._has_half_output = self.num_tokens == before
        elif not event.startswith(b":"):
            raise LookupError("an event without token ids")
        if not event or event.startswith(b":"):
            return
        head, _, data = event.partition(b"\ndata: ")
        kind = head.removeprefix(b"event: ")
        if kind in _WITHOUT_STATE:
            return
        if kind == b"content_block_start":
            self._open_block = decode_block_start(data).content_block.type
            self._num_blocks += 1
        elif kind == b"content_block_stop":
            self._open_block = None
        elif kind == b"message_delta":
            self._is_complete = True
        elif kind == b"message_stop":
            self._is_done = True
        else:
            raise LookupError("an event of another kind")

    @property
    def missing_end(self) -> bytes | None:
        if self._is_done:
            return b""
        return MESSAGE_STOP if self._is_complete else None

    def continuing(self, body: bytes) -> bytes:
        resume = msgspec.json.encode(
            ResumedMessage(
                token_ids=list(self._token_ids[0]), num_blocks=self._num_blocks, open_block=self._open_block
            )
        )
        return b'%b,"resume":%b}' % (body[: body.rindex(b"}")], resume)
