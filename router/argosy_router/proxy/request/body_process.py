"""Reads large bodies in a process of its own: `python -m argosy_router.proxy.request.body_process`.

Owns: the messages between a router and this process. Must not know: services, accounts, connections.
Invariant: it answers each message, in order, and ends when its input does.

A message is its length (4 bytes, big-endian) and msgpack. A `BodyJob` is followed by its body, and its answer is
`Found`. If that is no refusal, the router sends a `Wish`, whose answer, if it has a seed, is `Measurements`, followed
by the body if that has changed. A `ResponseJob` is followed by what an engine answered; its answer is `FoundResponse`.
A `RecordJob` is followed by the record of a stored response; its answer is `RecordParts`, followed by the output.
"""

# Not compiled: it runs as a program.

from __future__ import annotations

import gc
import logging
import signal
import sys
from array import array
from typing import Any, BinaryIO, cast

import msgspec

from argosy_protocol.errors import ApiError, BadRequest, InternalError, PayloadTooLarge
from argosy_protocol.program.freed_memory import return_freed_memory
from argosy_router.prompts.prompt_hash import MeasuredPrompts, measure
from argosy_router.proxy.request.body_rewrite import with_fields
from argosy_router.proxy.request.ended_response import Fields, FoundRecord, found_record, found_response
from argosy_router.proxy.request.examination import RoutedEndpoint, examine
from argosy_router.proxy.request.examined import Examined
from argosy_router.proxy.request.foreign_fields import keep_foreign_fields

LENGTH_BYTES = 4


class BodyJob(msgspec.Struct, tag="body"):
    """Examine a body."""

    endpoint: str
    body_bytes: int
    has_state: bool


class ResponseJob(msgspec.Struct, tag="response"):
    """Find the response in an answer (see `found_response`)."""

    answer_bytes: int
    is_event: bool
    fields: Fields


class RecordJob(msgspec.Struct, tag="record"):
    """Find the parts of a record (see `found_record`)."""

    record_bytes: int
    has_output: bool


class RecordParts(msgspec.Struct):
    """What was found in a record; None if it is none."""

    found: FoundRecord | None
    output_bytes: int = 0
    """Size of the items of its output, which follow."""


class Refusal(msgspec.Struct):
    """An error of the request."""

    status: int
    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        return cls(error.http_status, error.message, error.param, error.code)

    def error(self) -> ApiError:
        kinds = {kind.http_status: kind for kind in (BadRequest, PayloadTooLarge)}
        return kinds.get(self.status, InternalError)(self.message, param=self.param, code=self.code)


class Found(msgspec.Struct):
    """What a body has, or why it is refused."""

    examined: Examined | None = None
    refusal: Refusal | None = None


class Wish(msgspec.Struct):
    """Measure the prompts of the last body, and rewrite it."""

    seed: int | None
    """Of the hashes; None: nothing more is wanted of the body."""
    changes: dict[str, bytes] = {}
    """Other values of fields, as JSON."""
    is_reduced: bool = False
    """Whether to keep only what engines of other makes get."""


class Measurements(msgspec.Struct):
    """`MeasuredPrompts`, whose sequences are 8-byte integers of this machine."""

    hashes: bytes
    segment_bytes: bytes
    text_bytes: int
    token_ids: int
    has_media: bool
    body_bytes: int | None
    """Size of the rewritten body, which follows; None: it is as it was."""

    @classmethod
    def of(cls, measured: MeasuredPrompts, body_bytes: int | None) -> Measurements:
        return cls(
            array("Q", measured.hashes).tobytes(),
            array("Q", measured.segment_bytes).tobytes(),
            measured.text_bytes,
            measured.token_ids,
            measured.has_media,
            body_bytes,
        )

    def measured(self) -> MeasuredPrompts:
        hashes, sizes = array("Q", self.hashes), array("Q", self.segment_bytes)
        return MeasuredPrompts(hashes, sizes, self.text_bytes, self.token_ids, self.has_media)


def frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer messages until `requests` ends."""

    def received(kind: Any) -> Any:
        length = requests.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return None
        return msgspec.msgpack.decode(requests.read(int.from_bytes(length, "big")), type=kind)

    def answer(message: msgspec.Struct, body: bytes = b"") -> None:
        answers.write(frame(message))
        answers.write(body)
        answers.flush()

    def read(job: BodyJob) -> None:
        body = requests.read(job.body_bytes)
        try:
            examined, prompts = examine(cast("RoutedEndpoint", job.endpoint), body, has_state=job.has_state)
        except ApiError as error:
            answer(Found(refusal=Refusal.of(error)))
            return
        except Exception:
            logging.exception("a large request could not be read")
            answer(Found(refusal=Refusal.of(InternalError("internal error"))))
            return
        answer(Found(examined=examined))
        wish = received(Wish)
        if wish is not None and wish.seed is not None:
            rewritten = _rewritten(body, wish, job.endpoint)
            size = None if rewritten is body else len(rewritten)
            answer(Measurements.of(measure(prompts, wish.seed), size), b"" if size is None else rewritten)

    def read_record(job: RecordJob) -> None:
        record = requests.read(job.record_bytes)
        try:
            found, output = found_record(record, has_output=job.has_output)
        except ValueError:
            answer(RecordParts(None))
        else:
            answer(RecordParts(found, len(output)), output)

    while (job := received(BodyJob | ResponseJob | RecordJob)) is not None:
        if isinstance(job, BodyJob):
            read(job)
        elif isinstance(job, RecordJob):
            read_record(job)
        else:
            answer(found_response(requests.read(job.answer_bytes), job.is_event, job.fields))
        gc.collect()


def _rewritten(body: bytes, wish: Wish, endpoint: str) -> bytes:
    if wish.changes:
        body = with_fields(body, {name: msgspec.Raw(value) for name, value in wish.changes.items()})
    return keep_foreign_fields(body, endpoint) if wish.is_reduced else body


def main() -> int:
    # A router that drains still reads requests; this process ends after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return_freed_memory()
    gc.disable()  # a million values would be looked at again and again while they are decoded
    gc.freeze()
    serve(sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
