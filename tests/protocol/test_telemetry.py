"""Telemetry frames, and peers of other versions."""

from __future__ import annotations

import msgspec
import pytest

from argosy_protocol.telemetry import (
    FrameReader,
    Hello,
    Load,
    Snapshot,
    Stored,
    TelemetryError,
    encode_frame,
    pack_u32,
    pack_u64,
    unpack_u64,
)


def test_frames_survive_any_cut() -> None:
    frames = [
        Hello(
            epoch="e", model="m", model_fingerprint="f", block_size=16,
            max_model_len=1, max_num_seqs=1, kv_cache_tokens=1,
        ),
        Snapshot(hashes=pack_u64([1, 2**64 - 1]), tokens=pack_u32([16, 32]), first=True, last=True),
        Load(core_step_age_s=0.5, num_running=3),
    ]  # fmt: skip
    data = b"".join(encode_frame(frame) for frame in frames)
    for size in (1, 3, 1000):
        reader = FrameReader()
        assert [f for i in range(0, len(data), size) for f in reader.feed(data[i : i + size])] == frames
    assert list(unpack_u64(frames[1].hashes)) == [1, 2**64 - 1]  # type: ignore[union-attr]


def raw_frame(**fields: object) -> bytes:
    payload = msgspec.msgpack.encode(fields)
    return len(payload).to_bytes(4, "little") + payload


def test_a_newer_engine_is_understood() -> None:
    reader = FrameReader()
    newer = raw_frame(type="load", core_step_age_s=0.1, num_running=2, gpu_temperature=60)
    unknown = raw_frame(type="adapters", loaded=["a"])
    assert list(reader.feed(unknown + newer)) == [Load(core_step_age_s=0.1, num_running=2)]
    assert reader.skipped == 1


def test_an_older_engine_is_understood() -> None:
    older = raw_frame(type="load", core_step_age_s=0.1)
    assert list(FrameReader().feed(older)) == [Load(core_step_age_s=0.1)]


@pytest.mark.parametrize(
    "data",
    [
        raw_frame(type="load"),
        raw_frame(type="stored", hashes="text", tokens=b""),
        b"\xff\xff\xff\x7f",
        b"\x01\0\0\0\xc1",
    ],
)
def test_malformed_frames_are_told_apart_from_unknown_ones(data: bytes) -> None:
    with pytest.raises(TelemetryError):
        list(FrameReader().feed(data))


def test_ragged_hash_arrays_are_refused() -> None:
    with pytest.raises(TelemetryError):
        unpack_u64(Stored(hashes=b"1234567", tokens=b"").hashes)
