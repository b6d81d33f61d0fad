"""Lines of the files of results, and the tokens that answers report.

Owns: their types. Must not know: the storage, how requests are sent.
"""

from __future__ import annotations

import codecs
import secrets
from typing import Final

import msgspec
from msgspec import Struct

from argosy_batch.batch_results import Tokens
from argosy_batch.line_request import LineAnswer
from argosy_protocol.batch_objects import BatchUsage, InputDetails, OutputDetails

_PIECE_BYTES: Final = 1024 * 1024
_check: Final = msgspec.json.Decoder(msgspec.Raw).decode


class _CachedDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class _ReasoningDetails(Struct, frozen=True):
    reasoning_tokens: int | None = None


class _Usage(Struct, frozen=True):
    """Of chats and completions, or of responses."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _CachedDetails | None = None
    input_tokens_details: _CachedDetails | None = None
    completion_tokens_details: _ReasoningDetails | None = None
    output_tokens_details: _ReasoningDetails | None = None


class _Answer(Struct, frozen=True):
    usage: _Usage | None = None


class OutputResponse(Struct, frozen=True, kw_only=True):
    """The answer to a request, in a file of results."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class OutputError(Struct, frozen=True, kw_only=True):
    """Why a request has no answer."""

    code: str
    message: str


class OutputLine(Struct, frozen=True, kw_only=True):
    """A line of a file of results, as OpenAI's."""

    id: str
    custom_id: str
    response: OutputResponse | None
    error: OutputError | None = None


def _encoded(custom_id: str, response: OutputResponse | None, error: OutputError | None) -> bytes:
    return msgspec.json.encode(
        OutputLine(
            id=f"batch_req_{secrets.token_hex(16)}", custom_id=custom_id, response=response, error=error
        )
    )


def answered(custom_id: str, answer: LineAnswer) -> bytes:
    """Return the line of a request that has an answer, without a line break."""
    response = OutputResponse(
        status_code=answer.status, request_id=answer.request_id, body=_json_of(answer.body)
    )
    return _encoded(custom_id, response, None)


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that was not executed, without a line break."""
    return _encoded(custom_id, None, OutputError(code=code, message=message))


def tokens_of(body: bytes) -> Tokens:
    """Read an answer's usage; zeros where it has none."""
    try:
        usage = msgspec.json.decode(body, type=_Answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        usage = None
    if usage is None:
        return (0, 0, 0, 0)
    cached = usage.prompt_tokens_details or usage.input_tokens_details
    reasoning = usage.completion_tokens_details or usage.output_tokens_details
    return (
        usage.prompt_tokens or usage.input_tokens or 0,
        (cached.cached_tokens or 0) if cached is not None else 0,
        usage.completion_tokens or usage.output_tokens or 0,
        (reasoning.reasoning_tokens or 0) if reasoning is not None else 0,
    )


def usage_of(tokens: Tokens) -> BatchUsage:
    """Return the usage that a batch shows."""
    given, cached, generated, reasoning = tokens
    return BatchUsage(
        input_tokens=given,
        input_tokens_details=InputDetails(cached_tokens=cached),
        output_tokens=generated,
        output_tokens_details=OutputDetails(reasoning_tokens=reasoning),
        total_tokens=given + generated,
    )


def _check_utf8(body: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), _PIECE_BYTES):
        decoder.decode(body[start : start + _PIECE_BYTES])
    decoder.decode(b"", final=True)


def _json_of(body: bytes) -> msgspec.Raw:
    """Return an answer's body as JSON: as it is, or as a text if it is none."""
    try:
        _check(body)  # makes no objects
        _check_utf8(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(body[:65536].decode("utf-8", "replace")))
    # a line of its own must not have line breaks; in JSON they occur between values only
    return msgspec.Raw(body.replace(b"\r", b" ").replace(b"\n", b" "))
