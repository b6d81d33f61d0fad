"""The requests in an input file: one JSON object per line.

Owns: what makes a line a request, and the limits of files and lines. Must not know: the storage, how requests are sent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from argosy_protocol.batch_objects import MAX_ERRORS, LineError
from argosy_protocol.errors import ApiError
from argosy_protocol.json_limits import check_values, is_too_deep, is_utf8

MAX_LINE_BYTES: Final = 4 * 1024 * 1024
"""A prompt of a million tokens, or some images."""
_LINES_PER_TURN: Final = 100
"""Lines that are checked before other work of the event loop has its turn; a short one takes some microseconds."""


class InputLine(Struct, frozen=True, kw_only=True):
    """One request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: Raw


class _Body(Struct, frozen=True):
    model: str
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
    async for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
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
