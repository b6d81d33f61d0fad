"""The shape of answers that the router makes itself: Anthropic's below /v1/messages, else OpenAI's.

Owns: bodies and events of errors, and the headers that tell a request's id.
Must not know: which error happened, and when.
"""

from __future__ import annotations

from argosy_protocol import anthropic
from argosy_protocol.errors import ApiError


def is_messages_path(path: bytes) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return anthropic.is_messages_path(path.decode("latin-1"))


def error_body(error: ApiError, path: bytes) -> bytes:
    return anthropic.error_body(error) if is_messages_path(path) else error.body()


def error_event(body: bytes, path: bytes) -> bytes:
    """Return the event by which a stream that has begun ends with an error; `body` has no line break."""
    kind = b"event: error\n" if is_messages_path(path) else b""
    return b"%bdata: %b\n\n" % (kind, body)


def id_headers(request_id: bytes, path: bytes) -> bytes:
    """Render the header lines that tell a request's id; Anthropic's clients read it as `request-id`."""
    lines = b"x-request-id: %b\r\n" % request_id
    return lines + b"request-id: %b\r\n" % request_id if is_messages_path(path) else lines
