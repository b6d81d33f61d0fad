"""Who used how much: sums, files, and that each request is entered once."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from argosy_router.append_file import AppendFile
from argosy_router.proxy.usage import TokenUsage, find_usage, without_usage
from argosy_router.usage_ledger import UsageLedger

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import Rig, rig
from .storyteller import PROMPT_TOKENS, Storyteller, length

NINE = 1_795_251_600.0
"""2026-11-21T09:00:00Z."""


def lines(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def sums(directory: Path, field: str) -> dict[tuple[str, str, str], int]:
    found: Counter[tuple[str, str, str]] = Counter()
    for line in lines(directory):
        found[line["hour"], line["key"], line["model"]] += line[field]
    return dict(found)


def sizes(directory: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(directory.iterdir())}


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (completion("x", 120, 96), TokenUsage(120, 96, 1)),
        (b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":3}}\n\ndata: [DONE]\n\n', (3, 0, 0)),
        (rb'{"content": "\"usage\": {\"prompt_tokens\": 5}"}', None),
        (b'{"usage": null}', None),
        (b"", None),
    ],
)
def test_usage_is_found_in_answers(tail: bytes, usage: TokenUsage | None) -> None:
    assert find_usage(tail) == usage


# the ledger


async def test_increments_add_up_by_key_model_and_hour(tmp_path: Path) -> None:
    now = NINE + 3599
    ledger = UsageLedger(tmp_path, "r1", clock=lambda: now)
    ledger.enter("blue", "tiny", 100, 60, 5)
    ledger.enter("blue", "tiny", 10, 0, 1)
    ledger.enter_unmetered("red", "tiny")
    await ledger.flush()
    ledger.enter("blue", "tiny", 1, 0, 1)
    now += 1
    ledger.enter("blue", "tiny", 7, 0, 2)
    await ledger.flush()
    await ledger.flush()
    nine, ten = ("2026-11-21T09:00:00Z", "blue", "tiny"), ("2026-11-21T10:00:00Z", "blue", "tiny")
    red = ("2026-11-21T09:00:00Z", "red", "tiny")
    assert sums(tmp_path, "prompt_tokens") == {nine: 111, ten: 7, red: 0}
    assert sums(tmp_path, "cached_tokens") == {nine: 60, ten: 0, red: 0}
    assert sums(tmp_path, "completion_tokens") == {nine: 7, ten: 2, red: 0}
    assert sums(tmp_path, "requests") == {nine: 3, ten: 1, red: 0}
    assert sums(tmp_path, "unmetered_requests") == {nine: 0, ten: 0, red: 1}
    assert list(sizes(tmp_path)) == ["2026-11-21T09Z.r1.jsonl", "2026-11-21T10Z.r1.jsonl"]
    assert len({line["id"] for line in lines(tmp_path)}) == 4


async def test_what_a_disk_refuses_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = UsageLedger(tmp_path, "r1", clock=lambda: NINE)
    ledger.enter("", "tiny", 1, 0, 1)
    await ledger.flush()
    before = (tmp_path / "2026-11-21T09Z.r1.jsonl").read_bytes()
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError("no space left on device")
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    ledger.enter("", "tiny", 2, 0, 1)
    await ledger.flush()
    ledger.enter("", "tiny", 4, 0, 1)
    await ledger.flush()
    assert (tmp_path / "2026-11-21T09Z.r1.jsonl").read_bytes() == before
    assert ledger.write_failures == 2
    monkeypatch.undo()
    await ledger.flush()
    assert [line["prompt_tokens"] for line in lines(tmp_path)] == [1, 6]


async def test_files_are_bounded_and_have_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy_router.usage_ledger.MAX_FILE_BYTES", 300)
    ledgers = [UsageLedger(tmp_path, "r1", clock=lambda: NINE) for _ in range(2)]
    for _ in range(3):
        for ledger in ledgers:
            ledger.enter("", "tiny", 1, 0, 1)
            await ledger.flush()
    assert [line["prompt_tokens"] for line in lines(tmp_path)] == [1] * 6
    assert len(sizes(tmp_path)) == 4
    assert max(sizes(tmp_path).values()) < 600


def test_a_torn_line_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b'{"a":1}\n{"b":')
    file = AppendFile(path)
    file.append(b'{"c":3}\n')
    file.close()
    assert path.read_bytes() == b'{"a":1}\n{"c":3}\n'


# requests


async def metered(r: Rig, *, metered: str = "yes") -> float:
    return r.metric(f'usage_requests_total{{key="",metered="{metered}",model="tiny"}}')


async def test_a_retried_request_is_entered_once(tmp_path: Path) -> None:
    async def die(connection: Connection, _: Received) -> None:
        connection.die()

    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, completion(prompt_tokens=40, cached=16))

    engines = [FakeEngine(script=die), FakeEngine(script=answer)]
    async with rig(engines, usage_log=tmp_path, policy="round-robin") as r:
        for number in range(4):
            assert (await r.chat(f"number {number}")).status_code == 200
        assert r.metric("retries_total") > 0
        assert await metered(r) == 4
        assert r.metric('usage_tokens_total{key="",kind="prompt",model="tiny"}') == 160
        assert r.metric('usage_tokens_total{key="",kind="cached",model="tiny"}') == 64
        assert r.metric('usage_tokens_total{key="",kind="completion",model="tiny"}') == 4
    assert sum(sums(tmp_path, "prompt_tokens").values()) == 160, "stopping writes the rest down"


async def test_answers_without_usage_are_counted_as_such() -> None:
    async def stop_midway(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        connection.die()

    async def refuse(connection: Connection, _: Received) -> None:
        connection.answer(400, b'{"error":{"message":"no"}}')

    async with rig([FakeEngine(script=stop_midway)]) as r:
        await r.chat(stream=True)
        r.engines[0].script = refuse
        assert (await r.chat()).status_code == 400
        assert await metered(r, metered="no") == 1
        assert await metered(r) == 0


# streams

CHOICE, USAGE = event("a"), b'data: {"choices": [],"usage":{"prompt_tokens":40,"completion_tokens":3}}\n\n'


@pytest.mark.parametrize(
    ("events", "left"),
    [
        (CHOICE + USAGE + DONE, CHOICE + DONE),
        (USAGE, b""),
        (DONE, DONE),
        (CHOICE.replace(b"\n\n", b"\r\n\r\n") + USAGE.replace(b"\n\n", b"\r\n\r\n"), None),
        (b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":4}}\n\n', None),
        (b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n', None),
        (rb'data: {"choices":[{"delta":{"content":"\"usage\" and \"choices\": []"}}]}' + b"\n\n", None),
    ],
)
def test_only_the_event_of_the_usage_is_kept_back(events: bytes, left: bytes | None) -> None:
    if left is None:
        left = events.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if b"\r" in events else events
    assert without_usage(events) == left


@pytest.mark.parametrize(
    ("options", "is_shown"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
@pytest.mark.parametrize("is_split", [False, True])
async def test_every_stream_is_metered_and_clients_see_what_they_asked_for(
    options: dict[str, Any], is_shown: bool, is_split: bool
) -> None:
    async def stream(connection: Connection, request: Received) -> None:
        assert request.json["stream_options"]["include_usage"] is True
        connection.begin_stream()
        for piece in (CHOICE, USAGE, DONE) if is_split else (CHOICE + USAGE + DONE,):
            connection.chunk(piece)
            await connection.writer.drain()
        connection.end_stream()

    async with rig([FakeEngine(script=stream)]) as r:
        answer = await r.chat(stream=True, **options)
        assert answer.content == CHOICE + (USAGE if is_shown else b"") + DONE
        assert await metered(r) == 1
        assert r.metric('usage_tokens_total{key="",kind="completion",model="tiny"}') == 3
        sent = r.engines[0].requests[-1].json
        assert sent["messages"][0]["content"] == "hi"
        expected = (options.get("stream_options") or {}).get("continuous_usage_stats")
        assert sent["stream_options"].get("continuous_usage_stats") == expected


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_migrated_stream_is_entered_once(options: dict[str, Any]) -> None:
    teller = Storyteller()
    async with rig([FakeEngine(script=teller), FakeEngine(script=teller)]) as r:
        size = len((await r.chat(stream=True, **options)).content)
        asked = 1
        for life in range(1, size, size // 6):
            teller.deaths = [life]
            asked += (await r.chat(stream=True, **options)).status_code == 200
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') > 0
        assert await metered(r) + await metered(r, metered="no") == asked
        told = await metered(r)
        assert told > asked / 2, "a death after the last token may leave the usage untold, others do not"
        assert r.metric('usage_tokens_total{key="",kind="prompt",model="tiny"}') == told * PROMPT_TOKENS
        assert r.metric('usage_tokens_total{key="",kind="completion",model="tiny"}') == told * length(0)
