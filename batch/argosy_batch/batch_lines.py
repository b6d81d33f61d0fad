"""Lines of a batch's files: the requests in its input, their results as they come, and the files of results.

Owns: what makes a line a request, the limits of files and lines, the parts of results of one batch, and the types of
the lines. Must not know: how requests are sent, what a lease is.
Invariants: a part is written once, under a name with its writer's term, so that processes never overwrite each other's;
of several results of one request, the first in the order of parts counts, and each request has at most one line in the
two files together.

    work/BATCH_ID/TERM-NUMBER.jsonl     one `_Result` per line
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from argosy_batch.object_store import BlobStore
from argosy_batch.router_client import MAX_ANSWER_BYTES
from argosy_protocol.batch_program import MAX_ERRORS, BatchUsage, InputDetails, LineError, OutputDetails
from argosy_protocol.errors import ApiError
from argosy_protocol.json_limits import MAX_MODEL_NAME, check_values, is_too_deep, is_utf8

MAX_LINE_BYTES: Final = 4 * 1024 * 1024
"""A prompt of a million tokens, or some images."""
_LINES_PER_TURN: Final = 100
"""Lines that are checked before other work of the event loop has its turn; a short one takes some microseconds."""
_SPLIT_BYTES: Final = 64 * 1024
"""Split in one turn: a megabyte of blank lines takes 80 ms."""


class InputLine(Struct, frozen=True, kw_only=True):
    """One request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: Raw


class _Body(Struct, frozen=True):
    model: Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
    """A batch's object has that of its first line, and lists have many objects."""
    stream: bool | None = None
    background: bool | None = None


class Validation(NamedTuple):
    """What a file has."""

    total: int
    """Requests."""
    model: str
    """The model of the first one."""
    errors: list[LineError]
    """At most `MAX_ERRORS`; none if the file can be run."""


_line_decoder: Final = msgspec.json.Decoder(InputLine)
_body_decoder: Final = msgspec.json.Decoder(_Body)


async def split_lines(
    chunks: AsyncIterable[bytes], max_bytes: int
) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Yield the lines that are not blank, with their numbers (from 1); None for one that exceeds `max_bytes`."""
    number, size, is_too_long = 1, 0, False
    held: list[bytes] = []
    async for part in _parts(chunks):
        *ended, rest = part.split(b"\n")
        for piece in ended:
            if is_too_long or size + len(piece) > max_bytes:
                yield number, None
            else:
                line = b"".join((*held, piece)) if held else piece
                if not line.isspace() and line:
                    yield number, line
            number += 1
            held, size, is_too_long = [], 0, False
        size += len(rest)
        is_too_long = is_too_long or size > max_bytes
        if is_too_long:
            held = []
        elif rest:
            held.append(rest)
    line = b"".join(held)
    if is_too_long:
        yield number, None
    elif line and not line.isspace():
        yield number, line


async def _parts(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the parts of each chunk that are split in one turn of the event loop."""
    async for chunk in chunks:
        for start in range(0, len(chunk), _SPLIT_BYTES):
            yield chunk[start : start + _SPLIT_BYTES]
            await asyncio.sleep(0)


async def validate(chunks: AsyncGenerator[bytes, None], endpoint: str, max_requests: int) -> Validation:
    """Check all lines of a file."""
    errors: list[LineError] = []
    seen: set[bytes] = set()
    total, model = 0, ""
    async with aclosing(chunks), aclosing(split_lines(chunks, MAX_LINE_BYTES)) as lines:
        async for number, line in lines:
            total += 1
            if total > max_requests:
                errors.append(
                    LineError(
                        code="maximum_requests_exceeded",
                        message=f"the file has more than {max_requests} requests (--batch-max-requests); split it",
                    )
                )
                break
            fault, asked = _check(line, endpoint, seen)
            model = model or asked
            if fault is not None:
                errors.append(msgspec.structs.replace(fault, line=number))
                if len(errors) >= MAX_ERRORS:
                    break
            if total % _LINES_PER_TURN == 0:
                await asyncio.sleep(0)
    if not total:
        errors.append(LineError(code="empty_file", message="the file has no requests"))
    return Validation(total, model, errors)


def decode_line(line: bytes) -> InputLine:
    """Decode a line that `validate` has found good."""
    return _line_decoder.decode(line)


def model_of(line: InputLine) -> str:
    """Return the model that a request names."""
    return _body_decoder.decode(line.body).model


def _check(line: bytes | None, endpoint: str, seen: set[bytes]) -> tuple[LineError | None, str]:
    """Return the fault of a line, if it has one, and its model. `seen` has digests of the ids of all lines before."""
    if line is None:
        return _fault("line_too_long", f"a line may have {MAX_LINE_BYTES} bytes at most"), ""
    try:
        check_values(line)
        if is_too_deep(line):
            return _fault("invalid_json_line", "the line is nested too deeply"), ""
        if not is_utf8(line):
            return _fault("invalid_json_line", "the line is not UTF-8"), ""
        request = _line_decoder.decode(line)
    except ApiError as error:
        return _fault("invalid_json_line", error.message), ""
    except msgspec.ValidationError as error:
        return _fault("invalid_request", str(error)[:900]), ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _fault("invalid_json_line", "the line is not valid JSON"), ""
    digest = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        return _fault("duplicate_custom_id", "another line before has the same custom_id", "custom_id"), ""
    seen.add(digest)
    if request.method != "POST":
        return _fault("invalid_method", "method must be POST", "method"), ""
    if request.url != endpoint:
        return _fault("invalid_url", f"url must be the batch's endpoint, {endpoint}", "url"), ""
    try:
        body = _body_decoder.decode(request.body)
    except msgspec.DecodeError as error:
        return _fault("invalid_body", f"body: {str(error)[:900]}", "body"), ""
    if body.stream:
        return _fault("invalid_body", "stream must be false in a batch", "body"), ""
    if body.background:
        return _fault("invalid_body", "background must be false in a batch", "body"), ""
    return None, body.model


def _fault(code: str, message: str, param: str | None = None) -> LineError:
    return LineError(code=code, message=message, param=param)


class LineAnswer(NamedTuple):
    """The final answer to a request."""

    status: int
    request_id: str
    body: bytes


log = logging.getLogger(__name__)

FLUSH_BYTES: Final = 1024 * 1024
_MAX_LINE_BYTES: Final = 2 * MAX_ANSWER_BYTES

Tokens = tuple[int, int, int, int]
"""Input, of these cached, output, of these reasoning."""


class _Result(Struct, frozen=True, array_like=True):
    """One request's result."""

    index: int
    """The request's place among all of the batch, from 0."""
    is_error: bool
    tokens: Tokens
    line: Raw
    """Its line in a file of results."""


_decoder: Final = msgspec.json.Decoder(_Result)


class BatchResults:
    """The results of one batch, as far as the process that runs it knows them."""

    def __init__(self, blobs: BlobStore, batch_id: str, term: int, total: int) -> None:
        """`term` is that of the router's lease."""
        self._blobs = blobs
        self._folder = f"work/{batch_id}"
        self._term = term
        self.total = total
        self._done = bytearray(total)
        self._parts: list[str] = []
        self._held: list[bytes] = []
        """Results that are in no part yet."""
        self._held_bytes = 0
        self._num_attempts = 0
        self._flushing = asyncio.Lock()
        self.num_bytes = 0
        """Of the lines of all results."""
        self.num_completed = 0
        self.num_failed = 0
        self.tokens: Tokens = (0, 0, 0, 0)

    @property
    def num_done(self) -> int:
        """Requests that have a result."""
        return self.num_completed + self.num_failed

    @property
    def is_large(self) -> bool:
        """Whether what is held should be flushed soon."""
        return self._held_bytes >= FLUSH_BYTES

    def is_done(self, index: int) -> bool:
        return bool(self._done[index])

    async def load(self) -> None:
        """Read what processes before have written."""
        self._parts = [entry.key for entry in await self._blobs.entries(self._folder)]
        async with aclosing(self._results()) as results:
            async for result in results:
                self._count(result)

    def add(self, index: int, line: bytes, tokens: Tokens, *, is_error: bool) -> None:
        """Take a result; `line` is JSON without line breaks."""
        result = _Result(index, is_error, tokens, Raw(line))
        if self.is_done(index):
            return
        self._count(result)
        encoded = msgspec.json.encode(result) + b"\n"
        self._held.append(encoded)
        self._held_bytes += len(encoded)

    async def flush(self) -> None:
        """Write what is held. If the storage fails, it is still held."""
        async with self._flushing:
            if not self._held:
                return
            number = len(self._held)
            data = b"".join(self._held)
            self._num_attempts += 1  # a failed one may have been written all the same
            key = f"{self._folder}/{self._term:012d}-{self._num_attempts:012d}.jsonl"
            await self._blobs.create(key, data)
            self._parts.append(key)
            del self._held[:number]
            self._held_bytes -= len(data)

    async def lines(self, *, of_errors: bool) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the file of results, or of errors. Flush first."""
        async with aclosing(self._results()) as results:
            async for result in results:
                if result.is_error is of_errors:
                    yield bytes(result.line) + b"\n"

    async def remove(self) -> None:
        """Remove all parts, because the files are written."""
        for entry in await self._blobs.entries(self._folder):
            await self._blobs.delete(entry.key)

    async def _results(self) -> AsyncGenerator[_Result, None]:
        """Yield each request's first result."""
        seen = bytearray(len(self._done))
        for part in list(self._parts):
            chunks = self._blobs.read(part)
            async with aclosing(chunks), aclosing(split_lines(chunks, _MAX_LINE_BYTES)) as lines:
                async for _, line in lines:
                    if line is None:  # longer than an answer can be
                        continue
                    try:
                        result = _decoder.decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        log.error("storage: a line of %s cannot be read; its request is sent again", part)
                        continue
                    if result.index < len(seen) and not seen[result.index]:
                        seen[result.index] = 1
                        yield result

    def _count(self, result: _Result) -> None:
        self._done[result.index] = 1
        self.num_bytes += len(result.line)
        self.num_failed += result.is_error
        self.num_completed += not result.is_error
        mine, more = self.tokens, result.tokens
        self.tokens = (mine[0] + more[0], mine[1] + more[1], mine[2] + more[2], mine[3] + more[3])


_PIECE_BYTES: Final = 1024 * 1024
_decode_raw: Final = msgspec.json.Decoder(msgspec.Raw).decode


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
        _decode_raw(body)  # makes no objects
        _check_utf8(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(body[:65536].decode("utf-8", "replace")))
    # a line of its own must not have line breaks; in JSON they occur between values only
    return msgspec.Raw(body.replace(b"\r", b" ").replace(b"\n", b" "))
