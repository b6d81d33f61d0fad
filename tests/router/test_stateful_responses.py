"""Stored responses through routers that share a storage: conversations, retrieval, and work in the background."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from argosy_batch.config import BatchConfig
from argosy_batch.directory_store import DirectoryStore
from argosy_batch.object_store import ObjectStore, Quota, QuotaExceeded
from argosy_batch.program import BatchProgram
from argosy_batch.stored_responses import MAX_RUN_S, StoredResponses, owner_of_responses
from argosy_protocol.errors import StorageUnavailable, TooManyRequests
from argosy_protocol.response_history import StoredResponse
from argosy_protocol.responses import ID_PREFIX
from argosy_router.config import ServerLimits
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.messages import Client, ClientListener
from argosy_router.http.sse import MAX_EVENT_BYTES
from argosy_router.proxy.request_body import LARGE_BODY_BYTES
from argosy_router.responses.background_responses import BackgroundResponses
from argosy_router.responses.response_store import StoringClient
from response_stream import final_response, parsed_events

from .fake_engine import Connection, FakeEngine, Received
from .harness import Rig, raw, read_all, rig, until
from .local_responses import local_responses
from .response_bodies import ITEM, PART, PATH, body, stream, whole

DAY_S = 86400.0
SECRETS = ("sk-one", "sk-two")


class Gate:
    """Answers like an engine, once it is open."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.open = asyncio.Event()
        self.lost = asyncio.Event()
        if is_open:
            self.open.set()

    async def __call__(self, connection: Connection, request: Received) -> None:
        await self.open.wait()
        given = request.headers.get("x-argosy-internal-response-id")
        name = f"resp_{given}" if given else "resp_others"
        echoed = {
            "background": bool(request.json.get("background")),
            "store": request.json.get("store", True),
        }
        if request.json.get("stream"):
            connection.begin_stream()
            for event in stream().replace(b'"resp_1"', b'"%b"' % name.encode()).split(b"\n\n")[:-1]:
                connection.chunk(event + b"\n\n")
            connection.end_stream()
        else:
            connection.answer(200, json.dumps(whole(id=name, **echoed)).encode())


def queued(name: str) -> StoredResponse:
    now = int(time.time())
    fields = {"id": name, "status": "queued", "created_at": now, "background": True, "store": True}
    return StoredResponse(msgspec.Raw(json.dumps(fields).encode()), [])


def unreserved() -> BodyReservation:
    return BodyReservation(BodyMemory(1 << 20), None, 0)


def storage(tmp_path: Path) -> BatchConfig:
    return BatchConfig(storage=str(tmp_path / "storage"))


def stored_at(tmp_path: Path, age_s: float = 0.0) -> StoredResponses:
    """The responses of a storage, as of some time from now."""
    store = ObjectStore(DirectoryStore(tmp_path / "storage"), Quota(1 << 30, 1000))
    return StoredResponses(store, now=lambda: time.time() + age_s)


@asynccontextmanager
async def stateful(tmp_path: Path, script: Any = None, **config: Any) -> AsyncIterator[Rig]:
    async with rig([FakeEngine(script=script or Gate(), **config)], storage=storage(tmp_path)) as r:
        yield r


async def created(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    told = await http.post(PATH, json=body(**fields))
    assert told.status_code == 200, told.text
    made: dict[str, Any] = told.json()
    return made


async def retrieved(r: Rig, name: str, status: str) -> dict[str, Any]:
    """Wait until a response has a status."""
    made: dict[str, Any] = {}

    async def has_status() -> bool:
        nonlocal made
        made = (await r.http.get(f"{PATH}/{name}")).json()
        return made["status"] == status

    async with asyncio.timeout(60):
        while not await has_status():
            pass
    return made


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_continues_at_another_router(tmp_path: Path, streamed: bool) -> None:
    async with stateful(tmp_path) as one, stateful(tmp_path) as other:
        asked = body(stream=streamed, input="first")
        told = await one.http.post(PATH, json=asked)
        first = final_response(parsed_events(told.content)) if streamed else told.json()
        second = await created(other.http, input="second", previous_response_id=first["id"])
        (received,) = other.engines[0].requests
        assert received.json["previous_response_id"] == first["id"]
        assert [item.get("role") for item in received.json["input"]] == ["user", "assistant", "user"]
        assert received.json["input"][0]["content"] == [{"type": "input_text", "text": "first"}]
        assert received.json["input"][2]["content"] == "second"
        third = await created(one.http, input=[{"id": "msg_1_0"}], previous_response_id=second["id"])
        assert len(one.engines[0].requests[-1].json["input"]) == 5
        for r in (one, other):
            assert (await r.http.get(f"{PATH}/{third['id']}")).json() == third
        items = await one.http.get(f"{PATH}/{second['id']}/input_items?limit=2")
        shown = items.json()
        assert [item["role"] for item in shown["data"]] == ["user", "assistant"]
        assert shown["has_more"]


async def test_the_tokens_of_a_conversation_are_counted(tmp_path: Path) -> None:
    async with stateful(tmp_path) as r:
        first = await created(r.http, input="first")
        fields = {"input": "second", "previous_response_id": first["id"], "background": True}
        told = await r.http.post(f"{PATH}/input_tokens", json=body(**fields))
        assert told.status_code == 200
        received = r.engines[0].requests[-1]
        assert received.path == f"{PATH}/input_tokens"
        assert [item.get("role") for item in received.json["input"]] == ["user", "assistant", "user"]
        assert len(list((tmp_path / "storage").rglob("resp_*.json"))) == 1, "nothing is stored"


async def test_a_large_request_is_read_in_steps_and_answered_like_another(tmp_path: Path) -> None:
    long = "x" * (LARGE_BODY_BYTES + 1)
    async with stateful(tmp_path) as r:
        first = await created(r.http, input=long)
        assert (await r.http.get(f"{PATH}/{first['id']}")).json() == first
        await created(r.http, input=long + "y", previous_response_id=first["id"])
        sizes = [
            len(item["content"]) for item in r.engines[0].requests[-1].json["input"] if item["role"] == "user"
        ]
        assert sizes[-1] == len(long) + 1
        assert len(r.engines[0].requests[-1].json["input"]) == 3
        told = await r.http.post(f"{PATH}/input_tokens", json=body(input=long, background=True))
        assert (told.status_code, r.engines[0].requests[-1].path) == (200, f"{PATH}/input_tokens")
        asked = await created(r.http, input=long, background=True)
        await retrieved(r, asked["id"], "completed")
        num_sent = len(r.engines[0].requests)
        refused = await r.http.post(PATH, json=body(input=long, temperature=7.0))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        gone = await r.http.post(PATH, json=body(input=long, previous_response_id="resp_none"))
        assert gone.status_code == 404
        assert len(r.engines[0].requests) == num_sent
        await r.until(lambda: r.router.server.body_memory.held == 0)


@pytest.mark.parametrize("has_storage", [False, True])
async def test_compaction_is_refused_by_name(tmp_path: Path, has_storage: bool) -> None:
    files = storage(tmp_path) if has_storage else BatchConfig()
    async with rig([FakeEngine()], storage=files) as r:
        told = await r.http.post(f"{PATH}/compact", json=body())
        assert (told.status_code, told.json()["error"]["code"]) == (400, "not_supported")


async def test_a_client_that_has_read_the_end_can_continue(tmp_path: Path) -> None:
    async with stateful(tmp_path) as r:
        name = ""
        async with r.http.stream("POST", PATH, json=body(stream=True)) as told:
            async for line in told.aiter_lines():
                if line.startswith('data: {"type":"response.completed"'):
                    name = json.loads(line.removeprefix("data: "))["response"]["id"]
                    assert (await r.http.get(f"{PATH}/{name}")).status_code == 200
        assert name


async def test_a_stream_whose_last_event_repeats_megabytes_is_whole_and_stored(tmp_path: Path) -> None:
    logprobs = b",".join(
        [b'{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}'] * (MAX_EVENT_BYTES // 50)
    )

    async def script(connection: Connection, request: Received) -> None:
        name = f'"resp_{request.headers["x-argosy-internal-response-id"]}"'.encode()
        *events, last, _ = stream().replace(b'"resp_1"', name).split(b"\n\n")
        connection.begin_stream()
        for event in (*events, last.replace(b'"logprobs":[]', b'"logprobs":[%b]' % logprobs)):
            connection.chunk(event + b"\n\n")
            await connection.writer.drain()
        connection.end_stream()

    async with stateful(tmp_path, script) as r:
        told = await r.http.post(PATH, json=body(stream=True))
        assert len(told.content) > MAX_EVENT_BYTES
        last = told.content.rpartition(b"\n\nevent: response.completed\ndata: ")[2]
        final = json.loads(last)["response"]
        assert final["status"] == "completed"
        assert (await r.http.get(f"{PATH}/{final['id']}")).json() == final


async def test_text_that_looks_like_the_last_event_does_not_hold_back_the_stream(tmp_path: Path) -> None:
    text = "event: response.completed"
    has_arrived = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        given = stream().replace(b'"hello"', b'"%b"' % text.encode())
        *events, last, _ = given.split(b"\n\n")
        connection.begin_stream()
        for event in events:
            connection.chunk(event + b"\n\n")
        await has_arrived.wait()
        connection.chunk(last + b"\n\n")
        connection.end_stream()

    async with (
        stateful(tmp_path, script) as r,
        asyncio.timeout(60),
        r.http.stream("POST", PATH, json=body(stream=True)) as told,
    ):
        received = b""
        async for piece in told.aiter_bytes():
            received += piece
            if b"event: response.output_item.done" in received:
                has_arrived.set()
        assert text in json.dumps(final_response(parsed_events(received)))


async def test_a_conversation_is_as_large_as_a_body_at_most(tmp_path: Path) -> None:
    server = ServerLimits(max_body_bytes=16384)
    async with rig([FakeEngine(script=Gate())], storage=storage(tmp_path), server=server) as r:
        large = [await created(r.http, input="x" * 9000) for _ in range(2)]
        ids = []
        for made in large:
            items = (await r.http.get(f"{PATH}/{made['id']}/input_items")).json()["data"]
            ids.append(items[0]["id"])
        num_requests = len(r.engines[0].requests)
        for fields in (
            {"input": [{"id": ids[0]}, {"id": ids[1]}]},
            {"input": [{"id": ids[0]}] * 3},
            {"input": "y" * 9000, "previous_response_id": large[0]["id"]},
        ):
            for background in (False, True):
                told = await r.http.post(PATH, json=body(background=background, **fields))
                assert (told.status_code, told.json()["error"]["type"]) == (413, "invalid_request_error")
        assert len(r.engines[0].requests) == num_requests
        await created(r.http, input=[{"id": ids[0]}])
        await created(r.http, input="y", previous_response_id=large[0]["id"])


class Held:
    """Counts the memory of request bodies of a router."""

    def __init__(self, r: Rig) -> None:
        self._memory = r.router.server.body_memory

    @property
    def size(self) -> int:
        return self._memory.held


@pytest.mark.parametrize("refers", ["previous", "item"])
async def test_a_conversation_counts_in_the_memory_of_bodies_until_its_request_ends(
    tmp_path: Path, refers: str
) -> None:
    gate = Gate()
    async with stateful(tmp_path, gate) as r:
        first = await created(r.http, input="x" * 5000)
        items = (await r.http.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
        fields: dict[str, Any] = {"input": [{"id": items[0]["id"]}]}
        if refers == "previous":
            fields = {"input": "y", "previous_response_id": first["id"]}
        held = Held(r)
        await r.until(lambda: held.size == 0)
        gate.open.clear()
        second = asyncio.ensure_future(created(r.http, **fields))
        await r.until(lambda: len(r.engines[0].requests) == 2)
        assert held.size > 10_000, "as it was loaded, and as it is sent"
        gate.open.set()
        await second
        await r.until(lambda: held.size == 0)
        gate.open.clear()
        third = asyncio.ensure_future(created(r.http, **fields))
        await r.until(lambda: len(r.engines[0].requests) == 3)
        third.cancel()
        await r.until(lambda: held.size == 0)
        gate.open.set()


async def test_a_background_responses_body_counts_until_it_has_ended(tmp_path: Path) -> None:
    gate = Gate(is_open=False)
    async with stateful(tmp_path, gate) as r:
        held = Held(r)
        made = [await created(r.http, input="x" * 5000, background=True) for _ in range(2)]
        await r.until(lambda: held.size in range(10_000, 11_000))
        await r.http.post(f"{PATH}/{made[0]['id']}/cancel")
        await r.until(lambda: held.size in range(5000, 6000))
        gate.open.set()
        await retrieved(r, made[1]["id"], "completed")
        await r.until(lambda: held.size == 0)


@pytest.mark.parametrize("background", [False, True])
async def test_a_conversation_beyond_the_memory_of_bodies_is_refused_for_now(
    tmp_path: Path, background: bool
) -> None:
    server = ServerLimits(max_body_bytes=16_000, max_inflight_bytes=16_000)
    async with rig([FakeEngine(script=Gate())], storage=storage(tmp_path), server=server) as r:
        first = await created(r.http, input="x" * 9000)
        fields = body(input="y", previous_response_id=first["id"], background=background)
        told = await r.http.post(PATH, json=fields)
        assert (told.status_code, "--max-inflight-bytes" in told.text) == (503, True)
        assert len(r.engines[0].requests) == 1
        await r.until(lambda: Held(r).size == 0)
        small = await created(r.http, input="x" * 900)
        await created(r.http, input="y", previous_response_id=small["id"])


async def test_what_is_read_of_the_storage_counts_in_the_memory_of_bodies_before_it_is_read(
    tmp_path: Path,
) -> None:
    """Requests of a hundred bytes had a record of any size read for each, without a bound: thirty for one of 20 MB
    took 780 MiB."""
    server = ServerLimits(max_body_bytes=16_000, max_inflight_bytes=16_000)
    async with rig([FakeEngine(script=Gate())], storage=storage(tmp_path), server=server) as r:
        made = await created(r.http, input="x" * 9000)
        memory = r.router.server.body_memory
        await r.until(lambda: memory.held == 0)
        memory.reserve(8000, None, 0)
        asked = [
            r.http.get(f"{PATH}/{made['id']}"),
            r.http.get(f"{PATH}/{made['id']}/input_items"),
            r.http.get(f"{PATH}/{made['id']}?stream=true"),
            r.http.post(f"{PATH}/{made['id']}/cancel"),
        ]
        for told in await asyncio.gather(*asked):
            assert (told.status_code, "--max-inflight-bytes" in told.text) == (503, True)
        assert memory.held == 8000
        memory.release(8000, None)
        assert (await r.http.get(f"{PATH}/{made['id']}")).json() == made
        assert memory.held == 0


async def test_an_answer_that_is_not_read_counts_in_the_memory_of_bodies(tmp_path: Path) -> None:
    """A response of any size was written at once, and stayed in memory for a minute on each connection that did not
    read it."""
    size = 24 << 20

    async def answer(connection: Connection, request: Received) -> None:
        name = f"resp_{request.headers['x-argosy-internal-response-id']}"
        connection.answer(200, json.dumps(whole(id=name, instructions="x" * size)).encode())

    async with stateful(tmp_path, answer) as r:
        made = await created(r.http)
        memory = r.router.server.body_memory
        await r.until(lambda: memory.held == 0)
        async with raw(r.router) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(f"GET {PATH}/{made['id']} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
            await r.until(lambda: any(connection.is_behind for connection in r.router.server.connections))
            written = [c.transport.get_write_buffer_size() for c in r.router.server.connections]
            assert sum(written) < 2 << 20
            assert memory.held >= size
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert (await read_all(reader)).count(b"x" * 1000) >= size // 1000 - 200
        await r.until(lambda: memory.held == 0)
        async with raw(r.router) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(f"GET {PATH}/{made['id']} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
            await r.until(lambda: any(connection.is_behind for connection in r.router.server.connections))
        await r.until(lambda: memory.held == 0)


async def test_records_are_read_for_routers_a_few_at_a_time_and_accounts_take_turns(tmp_path: Path) -> None:
    """All were read at once, whatever they took: thirty of 20 MB half a gigabyte."""
    begun: list[str] = []
    may_go = asyncio.Event()

    def prepare(jobs: BatchProgram) -> None:
        find = jobs.responses.find

        async def slow(owner: str, response_id: str) -> StoredResponse | None:
            begun.append(owner)
            await may_go.wait()
            return await find(owner, response_id)

        jobs.responses.find = slow  # type: ignore[method-assign]

    given: dict[str, Any] = {"api_keys": SECRETS, "storage": storage(tmp_path), "prepare": prepare}
    async with rig([FakeEngine(script=Gate())], **given) as r:
        keys = [{"authorization": f"Bearer {secret}"} for secret in SECRETS]
        told = [await r.http.post(PATH, json=body(), headers=key) for key in keys]
        paths = [f"{PATH}/{each.json()['id']}" for each in told]
        first = [asyncio.ensure_future(r.http.get(paths[0], headers=keys[0])) for _ in range(9)]
        await r.until(lambda: bool(begun))
        other = asyncio.ensure_future(r.http.get(paths[1], headers=keys[1]))
        await r.until(lambda: len(set(begun)) == 2)
        num_begun = len(begun)
        may_go.set()
        assert num_begun == 2
        assert {each.status_code for each in await asyncio.gather(*first, other)} == {200}


async def test_what_is_kept_to_be_stored_is_within_the_memory_of_bodies(tmp_path: Path) -> None:
    """Each answer could take 64 MiB, whatever was kept of others."""

    async def answer(connection: Connection, request: Received) -> None:
        name = f"resp_{request.headers['x-argosy-internal-response-id']}"
        size = (3 << 20) if request.json["input"] == "long" else (2 << 20)
        connection.answer(200, json.dumps(whole(id=name, instructions="x" * size)).encode())

    server = ServerLimits(max_body_bytes=16_000, max_inflight_bytes=5 << 19)
    async with rig([FakeEngine(script=answer)], storage=storage(tmp_path), server=server) as r:
        long = await created(r.http, input="long")
        assert len(long["instructions"]) == 3 << 20
        assert (await r.http.get(f"{PATH}/{long['id']}")).status_code == 404
        short = await created(r.http, input="short")
        assert (await r.http.get(f"{PATH}/{short['id']}")).json() == short
        await r.until(lambda: Held(r).size == 0)


class Recorded:
    """A client that notes what is written to it."""

    def __init__(self) -> None:
        self.written = b""
        self.is_finished = False

    def attach(self, listener: ClientListener) -> None:
        pass

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        self.written, self.is_finished = body, True

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self.written += first

    def send(self, data: bytes) -> None:
        self.written += data

    def finish(self) -> None:
        self.is_finished = True

    def abort(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("form", ["a stream", "the end of a stream", "whole"])
async def test_ends_that_wait_for_the_storage_are_within_the_memory_of_bodies(form: str) -> None:
    """Each could take 64 MiB, for two seconds. One for which there is no memory is sent at once, and not stored."""
    memory, size, number = BodyMemory(16 << 20), 1 << 20, 20
    may_store, stored, unstored = asyncio.Event(), [], []

    async def store(response: msgspec.Raw) -> None:
        await may_store.wait()
        stored.append(response)

    response = json.dumps(whole(id="resp_1", instructions="x" * size)).encode()
    end = b'event: response.completed\ndata: {"response":%b}\n\n' % response
    first = b"event: a\ndata: {}\n\n" if form == "a stream" else b""
    clients = [Recorded() for _ in range(number)]
    for client in clients:
        reserved = BodyReservation(memory, "hostile", 0)
        storing = StoringClient(client, "resp_1", store, reserved, lambda: unstored.append(None))
        if form == "whole":
            storing.respond(200, b"content-type: application/json", response)
            continue
        storing.start(200, b"content-type: text/event-stream", first or end)
        if first:
            storing.send(end)
        storing.send(b"data: [DONE]\n\n")
        storing.finish()
    await asyncio.sleep(0)
    assert 8 * size < memory.held <= 12 << 20
    waiting = memory.held // (size if form == "whole" else 2 * size)
    await until(lambda: sum(client.is_finished for client in clients) == number - waiting)
    memory.reserve(size, "other", 0)
    memory.release(size, "other")
    may_store.set()
    await until(lambda: all(client.is_finished for client in clients))
    assert (memory.held, len(stored), len(unstored)) == (0, waiting, number - waiting)
    expected = response if form == "whole" else first + end + b"data: [DONE]\n\n"
    assert all(client.written == expected for client in clients)


async def test_what_is_not_stored_is_not_found(tmp_path: Path) -> None:
    async with stateful(tmp_path) as r:
        unstored = await created(r.http, store=False)
        assert unstored["store"] is False
        stored = await created(r.http)
        deleted = await r.http.delete(f"{PATH}/{stored['id']}")
        assert deleted.json() == {"id": stored["id"], "object": "response", "deleted": True}
        for name in (unstored["id"], stored["id"], "resp_none", "..%2f..%2fetc"):
            for told in (
                await r.http.get(f"{PATH}/{name}"),
                await r.http.delete(f"{PATH}/{name}"),
                await r.http.post(f"{PATH}/{name}/cancel"),
                await r.http.get(f"{PATH}/{name}/input_items"),
                await r.http.post(PATH, json=body(previous_response_id=name)),
            ):
                assert (told.status_code, told.json()["error"]["type"]) == (404, "invalid_request_error")
        assert (await r.http.put(f"{PATH}/{name}")).status_code == 405
        assert (await r.http.get(PATH)).status_code == 405
        assert (await r.http.get(f"{PATH}/a/b")).status_code == 404


async def test_a_response_belongs_to_the_key_that_made_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    lines = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()} name={key[3:]}" for key in SECRETS]
    keys.write_text("\n".join(lines) + "\n")
    async with rig([FakeEngine(script=Gate())], api_keys_file=keys, storage=storage(tmp_path)) as r:
        one, two = (
            openai.AsyncOpenAI(base_url=f"{r.router.url}/v1", api_key=key, max_retries=0) for key in SECRETS
        )
        async with one, two:
            mine = await one.responses.create(**body())
            assert (await one.responses.retrieve(mine.id)).output_text == "hello"
            for use in (two.responses.retrieve, two.responses.cancel, two.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await use(mine.id)
            with pytest.raises(openai.NotFoundError):
                await two.responses.create(**body(previous_response_id=mine.id))
            assert (await r.http.get(f"{PATH}/{mine.id}")).status_code == 401
            with pytest.raises(openai.BadRequestError, match="synchronous"):
                await one.responses.cancel(mine.id)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_id_that_another_engine_chooses_is_replaced(tmp_path: Path, streamed: bool) -> None:
    async with stateful(tmp_path, has_telemetry=False) as r:
        told = await r.http.post(PATH, json=body(stream=streamed))
        made = final_response(parsed_events(told.content)) if streamed else told.json()
        assert b"resp_others" not in told.content
        assert (await r.http.get(f"{PATH}/{made['id']}")).json() == made
        await created(r.http, previous_response_id=made["id"], background=False)
        last = r.engines[0].requests[-1].json
        assert len(last["input"]) == 3
        assert "previous_response_id" not in last


async def test_an_error_is_not_stored(tmp_path: Path) -> None:
    async def refuse(connection: Connection, _: Received) -> None:
        connection.answer(400, b'{"error":{"message":"no","type":"invalid_request_error"}}')

    async with stateful(tmp_path, refuse) as r:
        told = await r.http.post(PATH, json=body())
        assert (told.status_code, told.json()["error"]["message"]) == (400, "no")
        assert not list((tmp_path / "storage").rglob("resp_*"))


@pytest.mark.parametrize(
    "answer", [b"[1]", b"{", b'{"id":"resp_1"}', json.dumps(whole(status="queued")).encode()]
)
async def test_an_answer_that_is_not_a_whole_response_is_not_stored(tmp_path: Path, answer: bytes) -> None:
    async def other(connection: Connection, _: Received) -> None:
        connection.answer(200, answer)

    async with stateful(tmp_path, other, has_telemetry=False) as r:
        assert (await r.http.post(PATH, json=body())).status_code == 200
        assert not list((tmp_path / "storage").rglob("resp_*"))
        failed = await retrieved(r, (await created(r.http, background=True))["id"], "failed")
        assert failed["error"]["message"]
        assert (await r.http.post(f"{PATH}/{failed['id']}/cancel")).json() == failed


async def test_a_background_response_goes_on_without_its_client(tmp_path: Path) -> None:
    gate = Gate(is_open=False)
    async with stateful(tmp_path, gate) as r, stateful(tmp_path) as other:
        made = await created(r.http, background=True, metadata={"a": "b"})
        assert (made["status"], made["output"]) == ("queued", [])
        assert (await other.http.get(f"{PATH}/{made['id']}")).json() == made
        early = await other.http.post(PATH, json=body(previous_response_id=made["id"]))
        assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
        gate.open.set()
        done = await retrieved(other, made["id"], "completed")
        assert (done["id"], done["background"]) == (made["id"], True)
        cancelled = await r.http.post(f"{PATH}/{done['id']}/cancel")
        assert cancelled.json() == done


async def test_a_background_response_is_streamed_from_any_event(tmp_path: Path) -> None:
    gate = Gate(is_open=False)
    async with stateful(tmp_path, gate) as r, stateful(tmp_path) as other:
        first = asyncio.ensure_future(r.http.post(PATH, json=body(background=True, stream=True)))
        await r.until(lambda: bool(r.engines[0].requests))
        gate.open.set()
        events = parsed_events((await first).content)
        made = final_response(events)
        again = await r.http.get(f"{PATH}/{made['id']}?stream=true&starting_after=3")
        assert parsed_events(again.content) == events[4:]
        assert (await retrieved(other, made["id"], "completed"))["output"] == made["output"]
        for answer in (
            await other.http.get(f"{PATH}/{made['id']}?stream=true"),
            await r.http.get(f"{PATH}/{made['id']}?stream=true&starting_after=x"),
            await r.http.get(f"{PATH}/{(await created(r.http))['id']}?stream=true"),
        ):
            assert answer.status_code == 400


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_background_response_of_another_engine_has_the_id_that_its_client_knows(
    tmp_path: Path, streamed: bool
) -> None:
    async with stateful(tmp_path, has_telemetry=False) as r:
        told = await r.http.post(PATH, json=body(background=True, stream=streamed))
        if streamed:
            made = [event["response"] for event in parsed_events(told.content) if "response" in event]
            assert len(made) >= 2
            assert len({each["id"] for each in made}) == 1
            assert all(each["background"] and each["store"] for each in made)
        else:
            made = [told.json()]
        kept = await retrieved(r, made[0]["id"], "completed")
        assert (kept["id"], kept["background"], kept["store"]) == (made[0]["id"], True, True)
        if streamed:
            assert kept == made[-1]
        assert (await r.http.post(f"{PATH}/{kept['id']}/cancel")).json() == kept


@pytest.mark.parametrize("background", [False, True], ids=["stored", "background"])
@pytest.mark.parametrize("is_foreign", [False, True], ids=["our engine", "another engine"])
async def test_long_last_events_are_read_by_another_process(
    tmp_path: Path, background: bool, is_foreign: bool
) -> None:
    """One of 30 MB held the event loop for a quarter of a second, of a background response for half of one."""
    text = "x" * (2 * LARGE_BODY_BYTES)

    async def answer(connection: Connection, request: Received) -> None:
        given = request.headers.get("x-argosy-internal-response-id")
        response = whole(id=f"resp_{given}" if given else "resp_others", instructions=text)
        connection.begin_stream()
        for name, fields in (
            ("created", {"response": {**response, "instructions": "", "status": "in_progress"}}),
            ("output_text.delta", {"delta": "hello"}),
            ("completed", {"response": response}),
        ):
            connection.chunk(b"event: response.%b\ndata: " % name.encode())
            connection.chunk(json.dumps({"type": f"response.{name}", **fields}).encode() + b"\n\n")
        connection.chunk(b"event: behind\ndata: {}\n\n")
        connection.end_stream()

    async with stateful(tmp_path, answer, has_telemetry=not is_foreign) as r:
        told = await r.http.post(PATH, json=body(background=background, stream=True))
        blocks = told.content.split(b"\n\n")
        names = [block.partition(b"\n")[0] for block in blocks if block and not block.startswith(b":")]
        expected = ("response.created", "response.output_text.delta", "response.completed", "behind")
        assert names == [f"event: {name}".encode() for name in expected]
        made = json.loads(blocks[-3].partition(b"data: ")[2])["response"]
        assert made["instructions"] == text
        assert r.router.large_bodies.process is not None
        assert r.metric('large_bodies_total{outcome="read"}') == 1 + (background and is_foreign)
        assert await retrieved(r, made["id"], "completed") == made
        assert made.get("background", False) == (background and is_foreign)


async def test_large_stored_responses_are_read_by_another_process(tmp_path: Path) -> None:
    """To cancel or continue one of 33 MB held the event loop for 100 to 300 ms, to look for the end of a background
    response whose conversation is long for 90 ms every two seconds."""
    text = "x" * (2 * LARGE_BODY_BYTES)
    asked: list[Any] = []
    gate = Gate()

    async def answer(connection: Connection, request: Received) -> None:
        asked.append(request.json)
        await gate.open.wait()
        name = f"resp_{request.headers['x-argosy-internal-response-id']}"
        output = [{**ITEM, "content": [{**PART, "logprobs": [{"token": text, "logprob": 0.0}]}]}]
        fields = {
            "background": bool(request.json.get("background")),
            "instructions": request.json["instructions"],
        }
        connection.answer(200, json.dumps(whole(id=name, output=output, **fields)).encode())

    async with stateful(tmp_path, answer) as r:

        def reads() -> float:
            return r.metric('large_bodies_total{outcome="read"}')

        made = await created(r.http, instructions="i")
        before = reads()
        assert (await r.http.get(f"{PATH}/{made['id']}")).json() == made
        assert (await r.http.post(f"{PATH}/{made['id']}/cancel")).status_code == 400, (
            "it was not in the background"
        )
        listed = (await r.http.get(f"{PATH}/{made['id']}/input_items")).json()
        assert [item["content"][0]["text"] for item in listed["data"]] == ["hi"]
        assert reads() == before + 3
        await created(r.http, instructions="i", previous_response_id=made["id"], input="and then?")
        assert reads() >= before + 5, "the record, and the response that continues it"
        texts = [
            part["text"] for item in asked[-1]["input"] for part in item["content"] if isinstance(part, dict)
        ]
        assert texts[-1] == "hello"

        gate.open.clear()
        running = await created(r.http, instructions=text, background=True)
        before = reads()
        cancelled = (await r.http.post(f"{PATH}/{running['id']}/cancel")).json()
        assert (cancelled["status"], cancelled["instructions"]) == ("cancelled", text)
        assert reads() >= before + 3, "the record, its other status, the record as it is stored"
        assert (await r.http.post(f"{PATH}/{running['id']}/cancel")).json() == cancelled
        await r.until(lambda: r.router.requests.inflight == 0)


class SlowStore(DirectoryStore):
    """Replaces no document before it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_store = asyncio.Event()

    async def replace(self, key: str, data: bytes, version: str) -> str:
        await self.may_store.wait()
        return await super().replace(key, data, version)


@pytest.mark.parametrize("form", ["a stream", "whole"])
async def test_ends_of_background_responses_that_wait_for_the_storage_are_within_the_memory_of_bodies(
    tmp_path: Path, form: str
) -> None:
    """Each could take 128 MiB, for eight minutes."""
    blobs, memory, size, number = SlowStore(tmp_path), BodyMemory(16 << 20), 1 << 20, 12
    stored = local_responses(StoredResponses(ObjectStore(blobs, Quota(1 << 30, 100))))
    background = BackgroundResponses(stored)
    names = [stored.new_id() for _ in range(number)]
    for name in names:
        clients: list[Client] = []
        reserved = BodyReservation(memory, "hostile", 0)
        await background.start("owner", name, queued(name), form == "a stream", reserved, clients.append)
        await until(lambda clients=clients: bool(clients))  # type: ignore[misc]
        response = json.dumps(whole(id=name, instructions="x" * size)).encode()
        if form == "whole":
            clients[0].respond(200, b"", response)
            continue
        clients[0].start(200, b"", b"event: response.completed\ndata: ")
        clients[0].send(b'{"response":%b}\n\n' % response)
        clients[0].finish()
    assert 8 * size < memory.held <= 12 << 20
    memory.reserve(size, "other", 0)
    memory.release(size, "other")
    blobs.may_store.set()
    await until(lambda: memory.held == 0)
    await background.close()  # waits for those that have failed, and hold no memory
    records = [await stored.find("owner", name) for name in names]
    texts = [bytes(record.response) for record in records if record is not None]
    completed = [b"x" * size in text for text in texts]
    assert 4 <= sum(completed) < number == len(completed)
    assert all(b"--max-inflight-bytes" in text for text in texts if b"x" * size not in text)


class FailingStore(DirectoryStore):
    """Does not replace a document until it has been asked some times."""

    def __init__(self, path: Path, num_failures: int) -> None:
        super().__init__(path)
        self.num_failures = num_failures
        self.works = asyncio.Event()

    async def replace(self, key: str, data: bytes, version: str) -> str:
        if self.num_failures:
            self.num_failures -= 1
            if not self.num_failures:
                self.works.set()
            raise StorageUnavailable
        return await super().replace(key, data, version)


def answer_whole(client: Client) -> None:
    client.respond(200, b"", json.dumps(whole()).encode())


@pytest.mark.parametrize(("num_failures", "status"), [(2, "completed"), (3, "queued")])
async def test_the_end_of_a_background_response_is_stored_once_the_storage_works(
    tmp_path: Path, num_failures: int, status: str
) -> None:
    blobs = FailingStore(tmp_path, num_failures)
    stored = local_responses(StoredResponses(ObjectStore(blobs, Quota(1 << 20, 100))))
    background = BackgroundResponses(stored, store_delays_s=(0.0, 0.0))
    name = stored.new_id()
    await background.start("owner", name, queued(name), False, unreserved(), answer_whole)
    await asyncio.wait_for(blobs.works.wait(), 60)
    await background.close()
    record = await stored.find("owner", name)
    assert record is not None
    assert (record.state().id, record.state().status) == (name, status)


async def test_background_responses_that_are_begun_at_once_keep_to_their_owners_limit(tmp_path: Path) -> None:
    stored = local_responses(stored_at(tmp_path))
    background = BackgroundResponses(stored, max_runs_of_owner=2)
    clients: list[Client] = []

    async def start(owner: str) -> None:
        name = stored.new_id()
        await background.start(owner, name, queued(name), False, unreserved(), clients.append)

    told = await asyncio.gather(*(start("one") for _ in range(5)), start("other"), return_exceptions=True)
    assert [isinstance(each, TooManyRequests) for each in told] == [False] * 2 + [True] * 3 + [False]
    await background.close()
    await start("one")
    await background.close()
    assert len(list((tmp_path / "storage").rglob("resp_*.json"))) == 4


async def test_a_streamed_response_that_nests_too_deeply_is_passed_on_but_not_stored(tmp_path: Path) -> None:
    last = b'event: response.completed\ndata: {"x":%b,"response":{}}\n\n' % (b"[" * 100_000 + b"]" * 100_000)

    async def nest(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(last)
        connection.end_stream()

    async with stateful(tmp_path, nest, has_telemetry=False) as r:
        told = await r.http.post(PATH, json=body(stream=True))
        assert told.content == last
        assert not list((tmp_path / "storage").rglob("resp_*"))


async def test_an_engine_that_goes_on_behind_the_last_event_is_stopped(tmp_path: Path) -> None:
    """Nothing that comes there is sent on, so that no client paces it."""
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "created_at": 1}
    last = b"event: response.completed\ndata: " + json.dumps({"response": response}).encode() + b"\n\n"
    sent = 0

    async def go_on(connection: Connection, _: Received) -> None:
        nonlocal sent
        connection.begin_stream()
        connection.chunk(last)
        with contextlib.suppress(ConnectionError):
            while True:
                connection.chunk(b"event: x\ndata: " + b"a" * 4096 + b"\n\n")
                sent += 4096
                await connection.writer.drain()
                await asyncio.sleep(0)

    async with stateful(tmp_path, go_on, has_telemetry=False) as r:
        async with asyncio.timeout(60.0):
            told = await r.http.post(PATH, json=body(stream=True))
        (event, *others) = told.content.split(b"\n\n")
        name = json.loads(event.partition(b"data: ")[2])["response"]["id"]
        assert len(b"".join(others)) < 128 * 1024
        assert (await r.http.get(f"{PATH}/{name}")).json()["status"] == "completed"
        await r.until(lambda: r.router.requests.inflight == 0)
        assert sent < 64 * 1024 * 1024


@pytest.mark.parametrize("use", ["cancel", "delete"])
async def test_a_background_response_is_ended(tmp_path: Path, use: str) -> None:
    gate = Gate(is_open=False)
    async with stateful(tmp_path, gate) as r:
        name = (await created(r.http, background=True))["id"]
        await r.until(lambda: bool(r.engines[0].requests))
        assert r.router.requests.inflight == 1
        if use == "cancel":
            told = await r.http.post(f"{PATH}/{name}/cancel")
            assert told.json()["status"] == "cancelled"
            assert (await r.http.get(f"{PATH}/{name}")).json() == told.json()
        else:
            assert (await r.http.delete(f"{PATH}/{name}")).status_code == 200
            assert (await r.http.get(f"{PATH}/{name}")).status_code == 404
        await r.until(lambda: r.router.requests.inflight == 0)


async def test_another_router_ends_a_background_response(tmp_path: Path) -> None:
    async with stateful(tmp_path, Gate(is_open=False)) as r, stateful(tmp_path) as other:
        cancelled, deleted = [(await created(r.http, background=True))["id"] for _ in range(2)]
        await r.until(lambda: r.router.requests.inflight == 2)
        assert (await other.http.post(f"{PATH}/{cancelled}/cancel")).json()["status"] == "cancelled"
        assert (await other.http.delete(f"{PATH}/{deleted}")).status_code == 200
        await r.until(lambda: r.router.requests.inflight == 0)
        assert (await r.http.get(f"{PATH}/{cancelled}")).json()["status"] == "cancelled"
        assert (await r.http.get(f"{PATH}/{deleted}")).status_code == 404


async def test_a_background_response_that_is_refused_has_failed(tmp_path: Path) -> None:
    async def refuse(connection: Connection, _: Received) -> None:
        connection.answer(400, b'{"error":{"message":"too long","type":"invalid_request_error"}}')

    async with stateful(tmp_path, refuse) as r:
        failed = await retrieved(r, (await created(r.http, background=True))["id"], "failed")
        assert failed["error"] == {"code": "server_error", "message": "too long"}
        streamed = await r.http.post(PATH, json=body(background=True, stream=True))
        events = parsed_events(streamed.content)
        assert [event["type"] for event in events] == ["response.created", "response.failed"]
        assert events[-1]["response"]["error"]["message"] == "too long"
        refused = await r.http.post(PATH, json=body(background=True, input=[]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


async def test_a_response_whose_router_has_stopped_has_failed(tmp_path: Path) -> None:
    async with stateful(tmp_path, Gate(is_open=False)) as r:
        name = (await created(r.http, background=True))["id"]
        for age_s, status in ((0.0, "queued"), (MAX_RUN_S + 1, "failed")):
            record = await stored_at(tmp_path, age_s=age_s).find(owner_of_responses(""), name)
            assert record is not None
            assert record.state().status == status
    ended = await stored_at(tmp_path).find(owner_of_responses(""), name)
    assert ended is not None
    assert ended.state().status == "failed"


async def test_the_oldest_responses_make_room_for_others(tmp_path: Path) -> None:
    seconds = itertools.count(int(time.time()))
    store = ObjectStore(DirectoryStore(tmp_path), Quota(1 << 20, 3), now=lambda: float(next(seconds)))
    stored = StoredResponses(store)
    names = [store.new_id(ID_PREFIX, DAY_S) for _ in range(5)]
    for name in names:
        record = StoredResponse(msgspec.Raw(json.dumps({"id": name, "status": "completed"}).encode()), [])
        await stored.add("owner", name, record)
    kept = [name for name in names if await stored.find("owner", name) is not None]
    assert kept == names[2:]
    large = StoredResponse(msgspec.Raw(b'"%b"' % (b"x" * (1 << 20))), [])
    with pytest.raises(QuotaExceeded):
        await stored.add("owner", store.new_id(ID_PREFIX, DAY_S), large)
    assert [name for name in names if await stored.find("owner", name) is not None] == kept


@pytest.mark.parametrize("has_telemetry", [True, False])
async def test_a_field_name_that_is_not_utf8_is_refused_at_once(tmp_path: Path, has_telemetry: bool) -> None:
    async with stateful(tmp_path, has_telemetry=has_telemetry) as r:
        before = (await created(r.http))["id"]
        num_requests = len(r.engines[0].requests)
        for fields in ({}, {"background": True}, {"stream": True}, {"previous_response_id": before}):
            content = json.dumps(body(**fields)).encode().replace(b"{", b'{"\xff":1,', 1)
            told = await r.http.post(PATH, content=content, headers={"content-type": "application/json"})
            assert told.status_code == 400, told.text
            assert "UTF-8" in told.json()["error"]["message"]
        assert len(r.engines[0].requests) == num_requests
