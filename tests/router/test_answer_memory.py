"""The bound on the memory of answers to requests of batches."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

import pytest

from argosy_batch import router_client
from argosy_batch.batch_lines import LineAnswer, answered, decode_line
from argosy_batch.line_requests import LinePace, LineRequests, LineWaits
from argosy_batch.router_client import AnswerMemory, HeldAnswer, RouterClient

from .batch_rig import line
from .harness import until


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "MAX_HELD_BYTES", 100)


class Reading:
    """One answer, and whether it is read."""

    def __init__(self, memory: AnswerMemory, account: str = "") -> None:
        self.is_read = True
        self.held = HeldAnswer(memory, account)
        self.held.reads(self._pause, self._resume)

    def _pause(self) -> None:
        assert self.is_read
        self.is_read = False

    def _resume(self) -> None:
        assert not self.is_read
        self.is_read = True


def test_beyond_the_limit_only_the_first_answer_is_read_on() -> None:
    memory = AnswerMemory()
    first, second, third = (Reading(memory) for _ in range(3))
    second.held.add(60)
    first.held.add(50)
    third.held.add(1)
    assert [each.is_read for each in (first, second, third)] == [False, True, False]
    second.held.add(200)
    assert second.is_read, "one is always completed"
    second.held.stops_reading()
    assert (memory.held, first.is_read) == (311, False), "it is held until it is written"
    second.held.clear()
    assert (memory.held, first.is_read, third.is_read) == (51, True, True)
    first.held.clear()
    third.held.clear()
    assert memory.held == 0


def test_the_next_one_is_read_while_the_limit_is_exceeded() -> None:
    memory = AnswerMemory()
    first, second, third = (Reading(memory) for _ in range(3))
    for each in (first, second, third):
        each.held.add(90)
    assert [each.is_read for each in (first, second, third)] == [True, False, False]
    first.held.clear()
    assert [second.is_read, third.is_read] == [True, False]


def test_answers_that_do_not_end_leave_memory_to_those_of_other_accounts() -> None:
    """A replica that sends little by little ends none of its answers. Three of them filled the memory, and batches of
    all other accounts stood still until their windows were over."""
    memory = AnswerMemory()
    hostile = [Reading(memory, account) for account in ("one", "one", "two", "two", "three")]
    for _ in range(60):
        for each in hostile:
            if each.is_read:
                each.held.add(1)
    assert hostile[0].is_read, "one is always completed"
    assert memory.held <= 60 + 50
    for number in range(3):
        others = [Reading(memory, "other") for _ in range(4)]
        for each in others:
            each.held.add(1)
        assert others[0].is_read, number
        for each in others:
            each.held.clear()
            assert each.is_read
    for each in hostile:
        each.held.clear()
    assert (memory.held, [each.is_read for each in hostile]) == (0, [True] * 5)


def test_an_account_alone_leaves_a_part_of_the_memory() -> None:
    memory = AnswerMemory()
    first, second = Reading(memory, "one"), Reading(memory, "one")
    first.held.add(50)
    second.held.add(25)
    assert second.is_read
    second.held.add(1)
    assert [first.is_read, second.is_read] == [True, False]
    first.held.clear()
    assert second.is_read


def test_an_answer_leaves_nothing_behind() -> None:
    memory = AnswerMemory()
    with memory.answer() as held:
        held.add(200)
        held.clear()
        held.add(300)
        assert memory.held == 300
    assert memory.held == 0


def test_an_answer_of_many_values_takes_a_few_times_its_size() -> None:
    body = b"[" + b"[]," * 700_000 + b"[]]"
    tracemalloc.start()
    try:
        line = answered("a", LineAnswer(200, "r", body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(body) < len(line) <= peak < 6 * len(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1',
        b'{"a": 1}}',
        b'{"a": "\xff"}',
        b'{"a": "\xc3',
        b'["\xc3\xa4", "\xed\xa0\x80"]',
        b"[NaN]",
        b"",
        b"[" * 100_000 + b"]" * 100_000,
        b'["' + b"x" * (1 << 20) + b'\xff"]',
    ],
)
def test_an_answer_that_is_no_json_is_a_text(body: bytes) -> None:
    shown = json.loads(answered("a", LineAnswer(200, "r", body)))["response"]["body"]
    assert shown == body[:65536].decode("utf-8", "replace")


def test_an_answer_that_is_json_is_kept_as_it_is() -> None:
    text = "x" * ((1 << 20) - 3) + "\u00e4\U0001f642"  # a character on both sides of a piece's end
    body = json.dumps({"a": [1, 2.5, None, text]}, ensure_ascii=False, indent=1).encode()
    line = answered("a", LineAnswer(200, "r", body))
    assert b"\n" not in line
    assert json.loads(line)["response"]["body"] == json.loads(body)


async def test_answers_that_were_cut_because_they_were_not_read_cost_no_attempt() -> None:
    """A router gives a connection up that is not read for a minute; the replica has not failed."""
    memory, num_asked = AnswerMemory(), 0
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 202\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        asked = await reader.readuntil(b"\r\n\r\n")
        if asked.startswith(b"GET"):
            writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 11\r\n\r\n{"room": 1}')
            writer.close()
            return
        length = int(asked.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        num_asked += 1
        before = memory.held
        writer.write(head + b'"' + b"x" * 100)
        await until(lambda: memory.held > before)  # above the limit, so the reading is paused
        other.clear()  # it is written, and the reading goes on
        if num_asked > 6:
            writer.write(b"x" * 100 + b'"')
        else:
            writer.transport.abort()
            other.add(150)
        writer.close()

    async def room(_: str) -> int:
        return 1

    async def at_once(_: float) -> None:
        return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with memory.answer() as other, memory.answer() as held:
        other.add(150)
        async with server, RouterClient(f"http://127.0.0.1:{port}", lambda: ["k" * 40]) as router:
            requests = LineRequests(router, LinePace(room, max_inflight=8), lambda: None, at_once)
            answer = await asyncio.wait_for(
                requests.answer(decode_line(line("a")), "", LineWaits(), held), 60.0
            )
    assert (answer.status, num_asked) == (200, 7)
