"""Recording a router's requests as a trace that `argosy bench router` can replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.openai import ChatCompletionRequest, decode_request
from argosy_router.config import ConfigError
from argosy_router.observability.lines import CapturedRequest, TraceCapture, read_trace
from argosy_router.simulation import oracle_tokens

from .fake_engine import Connection, FakeEngine, Received, completion
from .harness import chat, rig

SYSTEM = "You answer in one sentence. " * 60


def recorded(number: int, chunks: int = 3) -> CapturedRequest:
    return CapturedRequest(1000.0 + number, 100, 5, tuple(range(chunks)), tuple(range(30, 30 + chunks)))


async def test_a_recording_replays(tmp_path: Path) -> None:
    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, completion(prompt_tokens=500, cached=0))

    path = tmp_path / "trace.jsonl"
    questions = ["first question", "second, quite another one"]
    async with rig([FakeEngine(script=answer)], record=path) as r:
        for question in questions:
            await r.chat(SYSTEM + question)
    first, second = read_trace(path)
    assert (first.input_tokens, first.output_tokens) == (500, 1)
    assert second.arrival_s > first.arrival_s
    shared = sum(a == b for a, b in zip(first.blocks, second.blocks, strict=False))
    assert 0 < shared < len(first.blocks)
    assert first.ends[-1] <= 500
    assert 300 < oracle_tokens([first, second]) < 500
    text = path.read_text()
    assert "question" not in text
    request = decode_request("chat/completions", json.dumps(chat(SYSTEM + questions[0])).encode())
    assert isinstance(request, ChatCompletionRequest)
    (segments,) = prompt_segments(request)
    guess = chunk_hashes(segments, chain_seed("tiny"))
    assert len(guess) == len(first.blocks)
    assert not set(guess) & set(first.blocks), "who guesses a prompt cannot confirm it"


async def test_a_recording_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TraceCapture(path, max_bytes=500)
    for number in range(50):
        recorder.add(recorded(number))
    await recorder.flush()
    assert 300 < len(path.read_bytes()) <= 500
    count = len(read_trace(path))
    recorder.add(recorded(99))
    await recorder.flush()
    assert len(read_trace(path)) == count
    assert recorder.dropped == 1


async def test_requests_are_dropped_while_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy_router.observability.lines.MAX_WAITING_CHUNKS", 10)
    recorder = TraceCapture(tmp_path / "trace.jsonl", max_bytes=1 << 20)
    for number in range(10):
        recorder.add(recorded(number))
    assert recorder.dropped == 7


async def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        async with rig([], record=tmp_path / "missing" / "trace.jsonl"):
            pass
