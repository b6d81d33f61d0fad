"""Clients that follow the events of background responses: slow ones, and those whose events were dropped."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import timeit
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy_batch.directory_store import DirectoryStore
from argosy_batch.object_store import ObjectStore, Quota
from argosy_batch.stored_responses import StoredResponses
from argosy_protocol.errors import TooManyRequests
from argosy_protocol.response_history import StoredResponse
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.messages import Client, ClientListener
from argosy_router.proxy.ended_response import Fields, FoundResponse
from argosy_router.responses.background_responses import (
    MAX_FOLLOWERS,
    WRITE_BYTES,
    BackgroundResponses,
    BackgroundRun,
)

from .harness import DEADLINE_S, until
from .local_responses import local_responses
from .response_bodies import whole

OWNER = "owner"


class Reader:
    """A client that is slow: each write fills its buffer until `read`."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.end = asyncio.Event()
        self.is_aborted = False
        self._listener: ClientListener | None = None

    @property
    def data(self) -> bytes:
        return b"".join(self.writes)

    def read(self) -> None:
        assert self._listener is not None
        self._listener.on_client_resumed()

    async def read_all(self) -> None:
        """Read whenever there is something, until the end."""
        while not self.end.is_set():
            self.read()
            await asyncio.sleep(0)

    def leave(self) -> None:
        assert self._listener is not None
        self._listener.on_client_lost()

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.writes.append(body)
        self.end.set()

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self.send(first)

    def send(self, data: bytes) -> None:
        self.writes.append(data)
        assert self._listener is not None
        self._listener.on_client_paused()

    def finish(self) -> None:
        self.end.set()

    def abort(self) -> None:
        self.is_aborted = True
        self.end.set()


class Runs:
    """Streamed background responses of one owner."""

    def __init__(self, folder: Path, max_event_bytes: int = 1 << 24, poll_s: float = 2.0) -> None:
        records = StoredResponses(ObjectStore(DirectoryStore(folder), Quota(1 << 26, 100)))
        self.removed = records.remove
        self.stored = local_responses(records)
        self.background = BackgroundResponses(self.stored, max_event_bytes=max_event_bytes, poll_s=poll_s)

    async def begin(self, owner: str = OWNER, **given: Any) -> tuple[str, Client]:
        """Begin a response, with these fields; return its id, and the client that the engine answers."""
        name = self.stored.new_id()
        fields = {"id": name, "status": "queued", "created_at": int(time.time()), "background": True, **given}
        record = StoredResponse(msgspec.Raw(json.dumps(fields).encode()), [])
        engine: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        reserved = BodyReservation(BodyMemory(1 << 20), None, 0)
        await self.background.start(owner, name, record, True, reserved, engine.set_result)
        return name, await engine

    def follow(self, name: str, owner: str = OWNER) -> Reader:
        reader = Reader()
        self.background.follow(reader, owner, name, 0, b"")
        return reader


def delta(number: int, size: int) -> bytes:
    fields = {"type": "response.output_text.delta", "sequence_number": number, "delta": "x" * size}
    return b"event: response.output_text.delta\ndata: %b\n\n" % json.dumps(fields).encode()


def last(name: str) -> bytes:
    fields = {"type": "response.completed", "response": whole(id=name)}
    return b"event: response.completed\ndata: %b\n\n" % json.dumps(fields).encode()


async def test_a_slow_follower_gets_the_events_in_pieces(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    name, engine = await runs.begin()
    events = [delta(number, 10_000) for number in range(40)]
    engine.start(200, b"content-type: text/event-stream\r\n", events[0])
    for event in events[1:]:
        engine.send(event)
    reader = runs.follow(name)
    assert len(reader.writes) == 1, "a full buffer gets no more"
    engine.send(last(name))
    engine.finish()
    async with asyncio.timeout(60):
        await reader.read_all()
    assert reader.data == b"".join(events) + last(name)
    assert max(map(len, reader.writes)) < WRITE_BYTES + len(events[0])
    await runs.background.close()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_the_last_event_of_a_stream_is_stored_also_when_its_events_were_dropped(
    tmp_path: Path, line_end: bytes
) -> None:
    runs = Runs(tmp_path, max_event_bytes=100)
    name, engine = await runs.begin()
    stream = (delta(0, 1000) + b": alive\n\n" + last(name)).replace(b"\n", line_end)
    engine.respond(200, b"content-type: text/event-stream\r\n", stream)
    async with asyncio.timeout(60):
        while (record := await runs.stored.find(OWNER, name)) is None or not record.state().is_finished:
            pass
    assert json.loads(bytes(record.response)) == whole(id=name)
    await runs.background.close()


@pytest.mark.parametrize("max_event_bytes", [100, 1 << 24])
async def test_the_last_event_is_kept_with_the_others_only(tmp_path: Path, max_event_bytes: int) -> None:
    runs = Runs(tmp_path, max_event_bytes=max_event_bytes)
    size = 1 << 20
    tracemalloc.start()
    try:
        for _ in range(4):
            name, engine = await runs.begin()
            end = last(name).replace(b'"hello"', b'"%b"' % (b"x" * size))
            engine.respond(200, b"content-type: text/event-stream\r\n", delta(0, 10) + end)
            del engine, end
            async with asyncio.timeout(60):
                while (
                    record := await runs.stored.find(OWNER, name)
                ) is None or not record.state().is_finished:
                    pass
            del record
        events = 4 * size if max_event_bytes > size else 0
        await until(lambda: tracemalloc.get_traced_memory()[0] < events + size // 2)
    finally:
        tracemalloc.stop()
    await runs.background.close()


async def test_a_follower_whose_events_were_dropped_sees_that_its_stream_is_cut(tmp_path: Path) -> None:
    runs = Runs(tmp_path, max_event_bytes=30_000)
    name, engine = await runs.begin()
    engine.start(200, b"content-type: text/event-stream\r\n", delta(0, 10_000))
    reader = runs.follow(name)
    engine.send(delta(1, 10_000))
    engine.send(delta(2, 20_000))
    reader.read()
    assert reader.is_aborted
    assert reader.data == delta(0, 10_000)
    await runs.background.close()


async def test_a_follower_of_a_cancelled_response_sees_the_end(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    name, engine = await runs.begin()
    engine.start(200, b"content-type: text/event-stream\r\n", delta(0, 10))
    reader = runs.follow(name)
    reader.read()
    runs.background.end(OWNER, name)
    assert reader.end.is_set()
    assert not reader.is_aborted
    await runs.background.close()


def streamed_run(counted: list[int]) -> BackgroundRun:
    """A run whose engine is about to answer; the bytes of its events go to `counted`."""
    return BackgroundRun(
        OWNER, "resp_1", b"{}", True, BodyReservation(BodyMemory(1 << 20), None, 0), counted.append
    )


async def test_the_time_of_an_answer_without_events_grows_with_its_length() -> None:
    """CPU times are compared: an engine that answers a request for a stream with 16 times as much JSON, in pieces, had
    all of it copied and searched for each piece, which took 256 times as long."""

    def cpu_s(pieces: int) -> float:
        def answer() -> None:
            run = streamed_run([])
            run.start(200, b"", b"{")
            for _ in range(pieces):
                run.send(b"x" * 65536)
            run.finish()

        return min(timeit.repeat(answer, timer=time.process_time, number=1, repeat=3))

    assert cpu_s(480) < 64 * max(cpu_s(30), 0.001)


async def test_short_events_count_as_what_they_take() -> None:
    """An engine may send nothing but ends of events, or events of a letter: a megabyte of them took thirty."""
    counted: list[int] = []
    run = streamed_run(counted)
    tracemalloc.start()
    try:
        run.start(200, b"", b"\n\n" * 100_000)
        run.send(b"a\n\n" * 100_000)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(run.events) == 100_000
    assert sum(counted) == run.size > 0.9 * taken
    assert run.forget() == sum(counted)


async def test_a_read_of_tiny_events_is_searched_once() -> None:
    """CPU times are compared: each event was searched for the end of the response, 50 ms for 256 KiB."""
    data = b"a\n\n" * 87_000

    def split() -> None:
        assert len([event + b"\n\n" for event in data.split(b"\n\n") if event]) == 87_000

    def send() -> None:
        run = streamed_run([])
        run.start(200, b"", data)
        assert len(run.events) == 87_000

    send_s, split_s = (
        min(timeit.repeat(call, timer=time.process_time, number=1, repeat=5)) for call in (send, split)
    )
    assert send_s < 4 * split_s


async def test_events_of_another_engine_are_adopted_in_turns() -> None:
    """A million of them that wait for one response held the event loop for half a second."""
    reserved = BodyReservation(BodyMemory(1 << 20), None, 0)
    run = BackgroundRun(OWNER, "resp_1", b"{}", True, reserved, lambda _: None)
    event = b'event: response.in_progress\ndata: {"response":{"id":"resp_other"}}\n\n'
    run.start(200, b"", event + b"data: x\n\n" * 40_000)
    turns = 0
    while len(run.events) < 40_001:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 8
    run.abort()


@pytest.mark.parametrize("is_long", ["request", "refusal"])
async def test_refused_streams_keep_what_counts(tmp_path: Path, is_long: str) -> None:
    """Each kept its request twice, and the engine's refusal, and counted neither."""
    runs = Runs(tmp_path, max_event_bytes=1 << 20)
    fields = {"instructions": "x" * 400_000} if is_long == "request" else {}
    refusal = b"{" * (400_000 if is_long == "refusal" else 1)
    tracemalloc.start()
    try:
        for number in range(10):
            name, engine = await runs.begin(**fields)
            reader = runs.follow(name)
            engine.respond(400, b"", refusal + b"%d" % number)
            await reader.read_all()
            assert reader.is_aborted or b"response.failed" in reader.data
        del engine, reader
        gc.collect()  # a reader and what it follows refer to each other
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 << 20
    await runs.background.close()


async def test_whether_a_stored_response_is_over_is_read_without_its_output(tmp_path: Path) -> None:
    """A million items held the loop of `argosy batch` for more than a second at each read."""
    records = StoredResponses(ObjectStore(DirectoryStore(tmp_path), Quota(1 << 26, 100)))
    name = local_responses(records).new_id()
    item: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "content": []}
    fields = {"id": name, "status": "completed", "created_at": time.time(), "output": [item] * 50_000}
    record = StoredResponse(msgspec.Raw(json.dumps(fields).encode()), [])
    await records.add(OWNER, name, record)
    tracemalloc.start()
    try:
        assert await records.find(OWNER, name) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(record.response)


async def test_events_end_with_any_blank_line_wherever_pieces_are_cut() -> None:
    stream = b"data: a\n\ndata: b\r\n\r\n: ping\n\ndata: c\ndata: d\n\n"
    for step in range(1, len(stream) + 1):
        run = streamed_run([])
        run.start(200, b"", stream[:step])
        for start in range(step, len(stream), step):
            run.send(stream[start : start + step])
        run.finish()
        assert run.events == [b"data: a\n\n", b"data: b\n\n", b"data: c\ndata: d\n\n"]


async def test_nobody_waits_for_the_storage_to_read_another_account_s_responses(tmp_path: Path) -> None:
    """All were asked for one after the other: a response that was cancelled through another router went on while those
    of an account with many requests had their turn."""
    runs = Runs(tmp_path, poll_s=0.001)
    hangs, asked = asyncio.Event(), asyncio.Event()
    find = runs.stored.find

    async def slow(account: str, *given: Any, **fields: Any) -> StoredResponse | None:
        if account == "many":
            asked.set()
            await hangs.wait()
        return await find(account, *given, **fields)

    runs.stored.find = slow  # type: ignore[method-assign]
    await runs.begin("many")
    await asked.wait()
    name, _ = await runs.begin("cancelled")
    reader = runs.follow(name, "cancelled")
    assert await runs.removed("cancelled", name)
    await asyncio.wait_for(reader.end.wait(), DEADLINE_S)
    await runs.background.close()


@pytest.mark.parametrize("has_ended", [False, True])
async def test_events_of_one_account_make_no_room_for_those_of_another(
    tmp_path: Path, has_ended: bool
) -> None:
    """Those of the run that was begun longest ago were dropped, whoever sent many: its followers were cut."""
    runs = Runs(tmp_path, max_event_bytes=20_000)
    mine, engine = await runs.begin("small")
    reader = runs.follow(mine, "small")
    engine.start(200, b"", delta(0, 1000))
    if has_ended:
        engine.send(last(mine))
        engine.finish()
        reading = asyncio.ensure_future(reader.read_all())
        await reader.end.wait()
        await reading
    others = [await runs.begin("large") for _ in range(4)]
    readers = [runs.follow(name, "large") for name, _ in others]
    for _, other in others:
        other.start(200, b"", delta(0, 2000))
    for number in range(1, 10):
        for _, other in others:
            other.send(delta(number, 2000))
    for each in (reader, *readers):
        each.read()
    assert not reader.is_aborted
    assert sum(each.is_aborted for each in readers) >= 2
    assert runs.follow(mine, "small").writes[0].startswith(delta(0, 1000))
    await runs.background.close()


async def test_a_run_is_followed_by_a_few_clients_at_a_time(tmp_path: Path) -> None:
    """A thousand connections that follow one response made each of its events a thousand writes."""
    runs = Runs(tmp_path)
    name, engine = await runs.begin()
    first = [runs.follow(name) for _ in range(MAX_FOLLOWERS)]
    with pytest.raises(TooManyRequests, match="stream this response already"):
        runs.follow(name)
    first[0].leave()
    runs.follow(name)
    engine.start(200, b"", delta(0, 10))
    assert [len(reader.writes) for reader in first] == [0] + [1] * (MAX_FOLLOWERS - 1)
    await runs.background.close()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_that_is_no_stream_is_held_within_the_memory_of_bodies(is_streamed: bool) -> None:
    """Each could take 64 MiB, and an owner may have 256."""
    reserved = BodyReservation(BodyMemory(1 << 20), None, 0)
    run = BackgroundRun(OWNER, "resp_1", b"{}", is_streamed, reserved, lambda _: None)
    run.start(200, b"", b"{" * 600_000)
    assert not run.answer.done()
    run.send(b"{" * 600_000)
    assert await run.answer == (0, b"")
    assert reserved.size <= 600_000


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_events_that_wait_to_be_adopted_are_dropped_with_the_others(is_dropped: bool) -> None:
    """They stayed until each of them had been read, megabytes that counted nowhere."""
    asked: list[bytes] = []
    may_find = asyncio.Event()

    async def find(_: str, data: bytes, is_event: bool, fields: Fields) -> FoundResponse:
        asked.append(data)
        await may_find.wait()
        return FoundResponse()

    reserved = BodyReservation(BodyMemory(1 << 20), None, 0)
    run = BackgroundRun(OWNER, "resp_1", b"{}", True, reserved, lambda _: None, find)
    event = b'event: response.in_progress\ndata: {"response":{"id":"resp_other"}}\n\n'
    run.start(200, b"", event)
    run.send(event + event)
    await until(lambda: len(asked) == 1)
    if is_dropped:
        run.forget()
    may_find.set()
    run.finish()
    await run.response_of(b"")
    assert len(asked) == (1 if is_dropped else 3)
    assert len(run.events) == (0 if is_dropped else 3)
