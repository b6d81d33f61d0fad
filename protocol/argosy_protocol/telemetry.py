"""What an engine tells of its prefix cache: telemetry frames to routers, and its hottest prefixes to a new replica.

One long-lived HTTP response (`headers.TELEMETRY_PATH`) carries frames, each a little-endian u32 length and a msgpack
map tagged by `type`. The first frame is `Hello`, followed by `Snapshot` slices until one has `last`, then deltas and at
least one `Load` per `HEARTBEAT_INTERVAL_S`. TCP keeps the stream ordered and free of gaps; a reader that cannot keep up
is disconnected and starts over with a new snapshot.

Versions: fields are only ever added, with defaults, and a reader skips frame types that it does not know. A change that
a reader of version N cannot follow raises `min_reader_version`, and such a reader treats the replica as foreign.

The hottest prefixes are at `GET /internal/hot_prefixes?max_tokens=N`, as msgpack, for a replica that computes them
before it gets requests. They are parts of clients' prompts: only whoever has the engine's administrative key gets them,
and only engines read them.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

PROTOCOL_VERSION = 1
HEARTBEAT_INTERVAL_S = 1.0
STALE_AFTER_S = 5.0
"""A reader that receives no frame for this long considers the stream stale (five missed heartbeats)."""
MAX_FRAME_BYTES = 1 << 20
SNAPSHOT_SLICE_CHUNKS = 8192
"""Chunks per snapshot frame: about 100 kB, so that building one does not stall the engine."""


Word = Annotated[str, Meta(max_length=256)]
"""A name or digest. Bounded, because readers keep it, and pass it on in reports of all replicas."""


class Hello(Struct, frozen=True, kw_only=True, tag="hello", tag_field="type", omit_defaults=True):
    """Identity of the engine. `epoch` is new with every start of the engine core; what other epochs announced is
    void."""

    version: int = PROTOCOL_VERSION
    min_reader_version: int = 1
    epoch: Word
    rank: int = 0
    data_parallel_size: int = 1
    """Number of engine cores. `max_num_seqs`, `kv_cache_tokens`, and the counts of `Load`, are sums over them; the
    rates, times and shares of `Load` are those of one core on average, or of the slowest one."""
    model: Annotated[str, Meta(max_length=4096)]
    """The engine's first name for its model, with which chunk hashes are seeded."""
    model_fingerprint: Word
    """Digest of everything that determines tokens and text (samples of all weights, config, dtype, tokenizer, chat
    template, default parameters). Streams may migrate only between equal fingerprints."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int
    schedules_by_priority: bool = False
    """Whether requests may have a `priority`; an engine without priority scheduling refuses it."""
    takes_model_name: bool = False
    """Whether answers use the model name in `headers.MODEL_NAME`, which need not be one of the engine's own."""
    engine_version: Word = ""


class Snapshot(Struct, frozen=True, kw_only=True, tag="snapshot", tag_field="type", omit_defaults=True):
    """A slice of the resident chunks. A reader clears its state at `first`, and is synced after `last`."""

    hashes: bytes = b""
    """u64 little-endian array"""
    tokens: bytes = b""
    """u32 little-endian array: prompt tokens covered up to and including that chunk"""
    first: bool = False
    last: bool = False


class Stored(Struct, frozen=True, kw_only=True, tag="stored", tag_field="type"):
    """These chunks became resident."""

    hashes: bytes
    tokens: bytes


class Removed(Struct, frozen=True, kw_only=True, tag="removed", tag_field="type"):
    """These chunks are no longer resident."""

    hashes: bytes


class Cleared(Struct, frozen=True, kw_only=True, tag="cleared", tag_field="type"):
    """The whole prefix cache was reset."""


class Load(Struct, frozen=True, kw_only=True, tag="load", tag_field="type", omit_defaults=True):
    """Load report, which is also the heartbeat."""

    core_step_age_s: float
    """Seconds since the core's loop last turned: a heartbeat of the core rather than of the HTTP server."""
    num_running: int = 0
    num_waiting: int = 0
    queued_uncached_tokens: int = 0
    """Prompt tokens of admitted requests that still have to be computed."""
    kv_usage: float = 0.0
    """Share of KV blocks in use by running requests, 0..1."""
    prefill_tokens_per_s: float = 0.0
    """Measured prefill rate; 0 if not measured yet."""
    decode_step_s: float = 0.0
    """Measured seconds per decode step; 0 if not measured yet."""
    longest_step_s: float = 0.0
    """Longest step in the last minutes of computing; a core without a step for several times as long is stuck. 0 if not
    measured yet or not reported."""
    num_yielding: int = 0
    """Of `num_running` and `num_waiting`, sequences of calls with several: an engine takes batch slots from them for
    other calls. 0 if not reported."""


class Draining(Struct, frozen=True, kw_only=True, tag="draining", tag_field="type"):
    """The engine drains: it wants no new requests, finishes the running ones, and then ends the stream."""


Frame = Hello | Snapshot | Stored | Removed | Cleared | Load | Draining

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class _Tag(Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tag)
_KNOWN = {"hello", "snapshot", "stored", "removed", "cleared", "load", "draining"}


class TelemetryError(Exception):
    """The stream violated the protocol; the reader must drop the connection and start over."""


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame: length prefix and payload."""
    payload = _encoder.encode(frame)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits a byte stream into frames.

    Raises (from `feed`):
        TelemetryError: a frame is longer than `MAX_FRAME_BYTES`, or malformed.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.skipped = 0
        """Frames of a type this version does not know."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= 4:
                (length,) = _LENGTH.unpack_from(self._buffer, position)
                if length > MAX_FRAME_BYTES:
                    raise TelemetryError(f"frame of {length} bytes")
                if len(self._buffer) - position - 4 < length:
                    break
                payload = bytes(self._buffer[position + 4 : position + 4 + length])
                position += 4 + length
                frame = self._decode(payload)
                if frame is not None:
                    yield frame
        finally:
            del self._buffer[:position]

    def _decode(self, payload: bytes) -> Frame | None:
        try:
            return _decoder.decode(payload)
        except msgspec.ValidationError as error:
            try:
                known = _tag_decoder.decode(payload).type in _KNOWN
            except msgspec.DecodeError:
                known = True
            if known:
                raise TelemetryError(f"malformed frame: {error}") from None
        except msgspec.DecodeError as error:
            raise TelemetryError(f"malformed frame: {error}") from None
        self.skipped += 1
        return None


def snapshot_of(resident: Mapping[int, int]) -> list[Snapshot]:
    """Slice resident chunks (hash -> prompt tokens up to its end) into frames; at least one, as a snapshot must end."""
    hashes, tokens = list(resident), list(resident.values())
    starts = range(0, max(len(hashes), 1), SNAPSHOT_SLICE_CHUNKS)
    return [
        Snapshot(
            hashes=pack_u64(hashes[start : start + SNAPSHOT_SLICE_CHUNKS]),
            tokens=pack_u32(tokens[start : start + SNAPSHOT_SLICE_CHUNKS]),
            first=start == starts[0],
            last=start == starts[-1],
        )
        for start in starts
    ]


def pack_u64(values: Sequence[int]) -> bytes:
    """Pack hashes as a little-endian u64 array."""
    return _to_little_endian(array("Q", values))


def unpack_u64(data: bytes) -> array[int]:
    return _from_little_endian("Q", data)


def pack_u32(values: Sequence[int]) -> bytes:
    """Pack token counts as a little-endian u32 array."""
    return _to_little_endian(array("I", values))


def unpack_u32(data: bytes) -> array[int]:
    return _from_little_endian("I", data)


def _to_little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_little_endian(typecode: Literal["I", "Q"], data: bytes) -> array[int]:
    try:
        values = array(typecode, data)
    except ValueError as error:
        raise TelemetryError(f"array of {len(data)} bytes: {error}") from None
    if sys.byteorder == "big":
        values.byteswap()
    return values


HOT_PREFIXES_PATH: Final = "/internal/hot_prefixes"
HOT_PREFIXES_CONTENT_TYPE: Final = "application/msgpack"
MAX_TOKENS: Final = 1 << 18
"""Most tokens of all prefixes together: 1 MiB, and some ten seconds of prefill."""
MAX_PREFIXES: Final = 256
MAX_WARM_UP_TOKENS: Final = 16_384
"""Most tokens that a new replica computes: prefill of about two seconds on a mid-size GPU. The
hottest prefixes come first, so more tokens save little, and a fleet that lacks replicas waits
meanwhile (bench/router/scaling_replay.py)."""


class HotPrefix(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prefix, from the prompt's beginning to the end of a KV cache block."""

    token_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_TOKENS)]
    """Little-endian u32 array."""
    cache_salt: Annotated[str, Meta(max_length=65_536)] | None = None
    """The salt that separates the prompts of one tenant from all others, as the request had it."""
    chunk_hashes: bytes = b""
    """Hashes of the router's chunks that end within the prefix: little-endian u64 array."""
    chunk_tokens: bytes = b""
    """For each of these the number of tokens up to its end: little-endian u32 array."""


class HotPrefixReport(Struct, frozen=True, kw_only=True):
    """The hottest prefixes, hottest first."""

    model_fingerprint: str
    """Of another model the token ids would mean nothing."""
    prefixes: Annotated[tuple[HotPrefix, ...], Meta(max_length=MAX_PREFIXES)] = ()
