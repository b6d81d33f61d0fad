"""Usage accounting: sums, files, and each request entered once."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from argosy_protocol.headers import RESUME
from argosy_router.observability.lines import AppendFile
from argosy_router.observability.request_log import UsageLedger
from argosy_router.proxy.answer_tokens import TAIL_BYTES, TokenUsage, UsageFinder, find_usage, without_usage

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import Rig, StoppedClock, chat, rig
from .resumable_stream import PROMPT_TOKENS, ResumableStream, length

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


def counts(usage: TokenUsage | None) -> tuple[int, int, int] | None:
    return usage and (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def sizes(directory: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(directory.iterdir())}


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (completion("x", 120, 96), (120, 96, 1)),
        (b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":3}}\n\ndata: [DONE]\n\n', (3, 0, 0)),
        (rb'{"content": "\"usage\": {\"prompt_tokens\": 5}"}', None),
        (b'{"usage": null}', None),
        (b"", None),
        (
            b'{"usage":{"prompt_tokens":7000,"completion_tokens":2},"prompt_logprobs":[{"5":{"decoded_token":"usage"}}]}',
            (7000, 0, 2),
        ),
        (b'{"usage":{"prompt_tokens":70},"x":[' + b'{"token":"usage"},' * 5000 + b"0]}", (70, 0, 0)),
    ],
)
def test_usage_is_found_in_answers(tail: bytes, usage: tuple[int, int, int] | None) -> None:
    assert counts(find_usage(tail)) == usage


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


async def test_entries_that_a_disk_refuses_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr("argosy_router.observability.request_log.MAX_FILE_BYTES", 300)
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

    async def leave_out(connection: Connection, _: Received) -> None:
        connection.answer(200, b'{"choices":[]}')

    async with rig([FakeEngine(script=stop_midway)]) as r:
        await r.chat(stream=True)
        r.engines[0].script = refuse
        assert (await r.chat()).status_code == 400
        assert await metered(r, metered="estimated") == 1
        assert await metered(r, metered="no") == 0
        r.engines[0].script = leave_out
        assert (await r.chat()).status_code == 200
        assert await metered(r, metered="no") == 1
        assert await metered(r) == 0


USED = {"prompt_tokens": 4000, "completion_tokens": 3000, "total_tokens": 7000}
BURIED = {**json.loads(completion("x")), "usage": USED}
"""As our engines answer: usage comes before what the prompt's tokens were worth."""


@pytest.mark.parametrize("entries", [40, 4000, 20_000, 100_000])
async def test_usage_is_found_wherever_it_stands(entries: int) -> None:
    body = {**BURIED, "prompt_logprobs": [{"123": {"logprob": -0.5, "decoded_token": "usage"}}] * entries}

    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, json.dumps(body).encode())

    async with rig([FakeEngine(script=answer)]) as r:
        assert (await r.chat()).json()["usage"] == USED
        assert await metered(r) == 1
        assert r.metric('usage_tokens_total{key="",kind="prompt",model="tiny"}') == 4000
        assert r.metric('usage_tokens_total{key="",kind="completion",model="tiny"}') == 3000


@pytest.mark.parametrize("step", [1, 7, 100, 5000])
@pytest.mark.parametrize("at", [0, 0.5, 1])
def test_usage_of_a_long_answer_is_found_however_it_is_cut(step: int, at: float) -> None:
    filler = 3 * TAIL_BYTES
    usage = b'"usage": ' + json.dumps(USED).encode() + b","
    before = int(at * filler)
    answer = b'{"a":"' + b"x" * before + b'",' + usage + b'"b":"' + b"y" * (filler - before) + b'"}'
    finder = UsageFinder()
    for start in range(0, len(answer), step):
        finder.feed(answer[start : start + step])
    assert counts(finder.usage) == (4000, 0, 3000)


# answers that were cut


async def test_usage_of_a_client_that_leaves_is_what_it_was_sent(tmp_path: Path) -> None:
    """Ids count where events carry them, else events do."""
    keys, log = tmp_path / "keys", tmp_path / "log"
    log.mkdir()
    keys.write_text("sk-a name=a tokens_per_minute=1000\n")
    ids = [list(range(5))] * 300

    async def endless(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        with_ids = RESUME in request.headers
        for some in ids:
            chunk = {
                "created": 1,
                "choices": [{"index": 0, "delta": {}, "token_ids": some if with_ids else None}],
            }
            connection.chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await connection.gone()

    for engine, tokens in (
        (FakeEngine(script=endless), 1500),
        (FakeEngine(script=endless, has_telemetry=False), 300),
    ):
        async with rig([engine], api_keys_file=keys, usage_log=log) as r:

            async def ask_and_leave() -> int:
                headers = {"authorization": "Bearer sk-a"}
                body = chat(stream=True, max_tokens=1)
                async with r.http.stream(
                    "POST", "/v1/chat/completions", json=body, headers=headers
                ) as answer:
                    if answer.status_code == 200:
                        seen = 0
                        async for piece in answer.aiter_bytes():
                            seen += piece.count(b"data: ")
                            if seen == len(ids):
                                break
                await r.until(lambda: r.router.requests.inflight == 0)
                return answer.status_code

            statuses = [await ask_and_leave() for _ in range(5)]
            paid = min(5, -(-1000 // tokens))
            assert statuses == [200] * paid + [429] * (5 - paid)
            assert r.metric('usage_tokens_total{key="a",kind="completion",model="tiny"}') == paid * tokens
            assert r.metric('usage_tokens_total{key="a",kind="prompt",model="tiny"}') > 0
            assert r.metric('usage_requests_total{key="a",metered="estimated",model="tiny"}') == paid
        assert lines(log)[-1]["estimated_requests"] == paid


async def test_a_stream_that_tells_its_usage_all_along_is_metered_when_it_is_cut() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 9, "total_tokens": 49}

    async def stop_midway(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        told = {**json.loads(event("hel").removeprefix(b"data: ")), "usage": usage}
        connection.chunk(b"data: " + json.dumps(told).encode() + b"\n\n")
        connection.die()

    # Time in which the replica could have generated more would count as well.
    async with rig([FakeEngine(script=stop_midway, has_telemetry=False)], clock=StoppedClock()) as r:
        await r.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert await metered(r) == 1
        assert r.metric('usage_tokens_total{key="",kind="completion",model="tiny"}') == 9


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
        assert (
            "continuous_usage_stats" not in sent["stream_options"]
        )  # it has no effect without include_usage


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_migrated_stream_is_entered_once(options: dict[str, Any]) -> None:
    script = ResumableStream()
    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        size = len((await r.chat(stream=True, **options)).content)
        asked = 1
        for life in range(1, size, size // 6):
            script.deaths = [life]
            asked += (await r.chat(stream=True, **options)).status_code == 200
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') > 0
        told = await metered(r)
        assert told + await metered(r, metered="estimated") == asked
        assert told > asked / 2, "a death after the last token may leave the usage untold, others do not"
        assert r.metric('usage_tokens_total{key="",kind="prompt",model="tiny"}') >= told * PROMPT_TOKENS
        assert r.metric('usage_tokens_total{key="",kind="completion",model="tiny"}') == asked * length(0)
