"""Router and `argosy batch`: who acts for whom, what a storage that hangs costs, and what an older release has left."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy_batch import app
from argosy_batch.app import MAX_DOWNLOADS
from argosy_batch.config import BatchConfig
from argosy_batch.directory_store import DirectoryStore
from argosy_batch.main import build_parser, config_of
from argosy_batch.program import BatchProgram
from argosy_batch.router_client import MAX_ROOM_BYTES, ROOM_S, AnswerMemory, RouterClient
from argosy_protocol import batch_program
from argosy_protocol.batch_program import ACCOUNT, BATCH_KEY_UID, NO_ROOM, ROOM_PATH
from argosy_protocol.errors import StorageFull, StorageUnavailable, Unavailable
from argosy_protocol.fleet import ServiceLimits
from argosy_protocol.headers import internal_key
from argosy_protocol.program import process
from argosy_protocol.program.flags import InvalidValue
from argosy_protocol.response_history import StoredResponse
from argosy_router import batch as batch_client
from argosy_router.auth.accounts import ANONYMOUS
from argosy_router.batch import BatchClient, ForwardedRoutes
from argosy_router.config import ConfigError, RouterConfig
from argosy_router.http.messages import ClientListener, Request
from argosy_router.responses import response_store
from argosy_router.responses.response_store import ResponseStore

from .batch_rig import CHATS, lines, official, results, start_batch, stored
from .fake_engine import MODEL, Connection, FakeEngine, Received, completion
from .harness import DEADLINE_S, FLEET_KEY, chat, rig, until

KEY = {"authorization": f"Bearer {internal_key(FLEET_KEY, BATCH_KEY_UID)}"}
RELEASED = Path(__file__).parent / "released" / "router_storage.json"


def content_of(request: Received) -> str:
    content: str = request.json["messages"][0]["content"]
    return content


async def echo(connection: Connection, request: Received) -> None:
    connection.answer(200, completion(content_of(request)))


# on whose behalf


async def test_the_program_acts_for_an_account_within_its_limits(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine(script=echo)]) as r:
        del r.http.headers["authorization"]
        for name, status in (("shop", 200), ("lab", 200), ("nobody", 403), ("", 403)):
            answer = await r.http.post(CHATS, json=chat(), headers=KEY | {ACCOUNT: name})
            assert answer.status_code == status, name
        assert answer.json()["error"]["code"] == "account_gone"
        assert r.metric('usage_requests_total{key="shop"') == 1


@pytest.mark.parametrize("authorization", ["Bearer sk-lab", "Bearer x", "", "Basic eA==", "Bearer é"])
async def test_no_client_acts_for_another_account(tmp_path: Path, authorization: str) -> None:
    async with stored(tmp_path, [FakeEngine(script=echo)]) as r:
        headers = {"authorization": authorization.encode(), ACCOUNT: "shop"}
        answer = await r.http.post(CHATS, json=chat(), headers=headers)
        assert answer.status_code == (200 if "lab" in authorization else 401)
        assert r.metric('usage_requests_total{key="shop"') == 0
        room = await r.http.get(ROOM_PATH, params={"model": MODEL}, headers=headers)
        assert room.status_code == (404 if "lab" in authorization else 401)
        files = await r.http.get("/v1/files", headers=headers)
        assert files.status_code == (200 if "lab" in authorization else 401)
        assert r.jobs is not None
        answers = [
            await r.http.request(method, r.jobs.url + path, headers=headers)
            for method, path in (
                ("GET", "/v1/files"),
                ("POST", "/v1/batches"),
                ("GET", "/internal/responses/resp_1"),
                ("POST", "/internal/heartbeats"),
            )
        ]
        assert {answer.status_code for answer in answers} == {401}
        assert {(await r.http.get(r.jobs.url + path)).status_code for path in ("/health", "/metrics")} == {
            200
        }


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/batches", "/v1/responses/resp_1", "/v1/models", "/metrics"]
)
async def test_the_program_s_key_opens_nothing_but_requests_of_batches(tmp_path: Path, path: str) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        answer = await r.http.get(path, headers=KEY | {ACCOUNT: "shop"})
        assert answer.status_code == 404


async def test_a_question_for_room_with_many_fields_is_refused(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r:
        answer = await r.http.get(ROOM_PATH + "?" + "a=1&" * 20, headers=KEY | {ACCOUNT: ""})
        assert answer.status_code == 400


async def test_requests_of_batches_have_their_room_and_no_more() -> None:
    may_answer = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        await may_answer.wait()
        await echo(connection, request)

    limits = {"limits": ServiceLimits(max_inflight_per_replica=4)}
    async with rig([FakeEngine(script=script)], fields=limits, fleet_key=FLEET_KEY) as r:

        async def room() -> int:
            answer = await r.http.get(ROOM_PATH, params={"model": MODEL}, headers=KEY | {ACCOUNT: ""})
            number: int = answer.json()["room"]
            return number

        assert await room() == 2
        sent = [
            asyncio.create_task(r.http.post(CHATS, json=chat(), headers=KEY | {ACCOUNT: ""}))
            for _ in range(2)
        ]
        await until(lambda: r.metric("batch_requests_inflight") == 2)
        assert await room() == 0
        refused = await r.http.post(CHATS, json=chat(), headers=KEY | {ACCOUNT: ""})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, NO_ROOM)
        mine = asyncio.create_task(r.chat())
        await until(lambda: len(r.engines[0].requests) == 3)
        may_answer.set()
        assert {answer.status_code for answer in await asyncio.gather(*sent, mine)} == {200}
        assert r.metric("batch_requests_inflight") == 0
        assert await room() == 2


def test_both_programs_need_the_common_key(tmp_path: Path) -> None:
    from argosy_batch.config import ConfigError as BatchConfigError
    from argosy_router.config import BatchLimits

    with pytest.raises(ConfigError, match="ARGOSY_FLEET_KEY"):
        RouterConfig(replicas=("http://x:1",), batch=BatchLimits(batch_url="http://x:1")).check()
    with pytest.raises(BatchConfigError, match="ARGOSY_FLEET_KEY"):
        BatchConfig(storage=str(tmp_path)).check()
    with pytest.raises(BatchConfigError, match="--storage is required"):
        BatchConfig(fleet_key=FLEET_KEY).check()


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "http://a:1/v1", "http://user:secret@a:1"])
def test_the_router_s_address_must_be_a_url(url: str) -> None:
    """The message does not repeat it, because it may have a password."""
    parser = build_parser()
    flags = parser.parse_args(["--storage", "s", "--router-url", url])
    with pytest.raises(
        InvalidValue, match=r"^--router-url: must be a URL such as http://HOST:PORT, without a path$"
    ):
        config_of(parser, flags, {"ARGOSY_FLEET_KEY": FLEET_KEY.decode()})


# a storage that hangs


class HangingProgram:
    """`argosy batch` that takes connections, and answers when the test lets it; those of one account at once."""

    def __init__(self, answered: str = "-") -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = 0
        self._answered = f"account: {answered}\r\n".encode()
        self._writers: list[asyncio.StreamWriter] = []
        self._is_cutting = False
        self.bodies: list[bytes] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    def cut(self) -> None:
        """Cut the connections of requests that have no answer, and of those that are asked again."""
        self._is_cutting = True
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.num_asked += 1
                lengths = [
                    line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                ]
                self.bodies.append(await reader.readexactly(int(lengths[0][15:]) if lengths else 0))
                if self._answered not in head:
                    if self._is_cutting:
                        writer.transport.abort()
                        return
                    self._writers.append(writer)
                    await self.may_answer.wait()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def record(size: int = 10) -> StoredResponse:
    return StoredResponse(msgspec.Raw(b'{"status":"completed","text":"%b"}' % (b"x" * size)), [])


async def test_the_end_of_an_answer_waits_for_the_storage_for_a_bounded_time() -> None:
    program = HangingProgram()
    async with program.serving() as url:
        route = BatchClient(url, lambda: ["k"])
        responses = ResponseStore(route, 86400.0, patience_s=0.01)
        await responses.keep("shop", responses.new_id(), record())
        outcomes = {series.name: series for series in responses.series()}["response_writes"]
        assert outcomes.sum(("late",)) == 1  # type: ignore[union-attr]
        await until(lambda: bool(program.bodies))
        program.may_answer.set()
        await until(lambda: outcomes.sum(("stored",)) == 1)  # type: ignore[union-attr]
        await responses.close()
        await route.close()


async def test_what_is_being_stored_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_WRITING_BYTES", 10_000)
    program = HangingProgram()
    async with program.serving() as url:
        route = BatchClient(url, lambda: ["k"])
        responses = ResponseStore(route, 86400.0, patience_s=0.0)
        series = {each.name: each for each in responses.series()}
        for account, refused in (("shop", 18), ("other", 37)):
            for _ in range(20):
                await responses.keep(account, responses.new_id(), record(3000))
            assert series["response_writes"].sum(("refused",)) == refused  # type: ignore[union-attr]
        program.may_answer.set()
        await until(lambda: series["response_writes"].sum(("stored",)) == 3)  # type: ignore[union-attr]
        await responses.close()
        await route.close()


async def test_a_program_that_hangs_is_not_asked_by_everybody(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    program = HangingProgram()
    async with program.serving() as url:
        route = BatchClient(url, lambda: ["k"], call_s=0.01, now=lambda: clock[0])
        for _ in range(batch_client.MAX_FAILURES + 10):
            with pytest.raises(StorageUnavailable):
                await route.call("GET", "/internal/responses/x", "shop")
        # On a busy machine a call's time may be over before the program has heard of it.
        assert 0 < program.num_asked <= batch_client.MAX_FAILURES
        assert route.has_failed
        clock[0] += batch_client.OPEN_S
        assert not route.is_open
        program.may_answer.set()
        slow = BatchClient(url, lambda: ["k"])
        assert (await slow.call("GET", "/internal/responses/x", "shop")).body == b"{}"
        await slow.close()
        await route.close()


@pytest.mark.parametrize("is_answering", [True, False])
async def test_what_fails_while_others_are_answered_is_no_failure_of_the_program(is_answering: bool) -> None:
    """One account had a thousand responses read at once: those that waited for their turn past the deadline had nobody
    ask the program for two seconds."""
    program = HangingProgram("other")
    async with program.serving() as url:
        route = BatchClient(url, lambda: ["k"])
        waiting = [
            asyncio.ensure_future(route.call("GET", "/internal/responses/x", "hostile"))
            for _ in range(batch_client.MAX_FAILURES)
        ]
        await until(lambda: program.num_asked == len(waiting))
        if is_answering:
            assert (await route.call("GET", "/internal/responses/x", "other")).body == b"{}"
        program.cut()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, StorageUnavailable) for each in ended)
        assert route.has_failed is not is_answering
        program.may_answer.set()
        await route.close()


async def test_a_stream_ends_while_the_program_is_away(tmp_path: Path) -> None:
    async def whole(connection: Connection, _: Received) -> None:
        answer = {"id": "resp_1", "status": "completed", "output": [], "created_at": 1, "model": MODEL}
        connection.answer(200, json.dumps(answer).encode())

    storage = BatchConfig(storage=str(tmp_path))
    async with rig([FakeEngine(script=whole)], storage=storage) as r:
        assert r.jobs is not None
        r.jobs.stopping.set()
        for listening in r.jobs.server.servers:
            listening.close()
        await r.jobs.server.shutdown()
        answer = await r.http.post("/v1/responses", json={"model": MODEL, "input": "hi"})
        assert answer.json()["status"] == "completed"
        assert r.metric('response_writes_total{outcome="failed"}') == 1
        lost = await r.http.get(f"/v1/responses/{answer.json()['id']}")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "storage_unavailable")
        files = await r.http.get("/v1/files")
        assert (files.status_code, files.json()["error"]["code"]) == (503, "storage_unavailable")
        assert (await r.chat()).status_code == 200


# objects that cannot be read, and answers that are lost


async def test_a_malformed_lease_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    objects = tmp_path / "storage" / "objects"
    for path in ("leases/x", "leases/a/b/c.json", "leases/owner/no-id.json"):
        (objects / path).parent.mkdir(parents=True, exist_ok=True)
        (objects / path).write_bytes(b"?")
    may_answer = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        await may_answer.wait()
        await echo(connection, request)

    async with stored(tmp_path, [FakeEngine(script=script)], {"lease_s": 1.5}) as r, official(r) as client:
        assert r.jobs is not None
        batch = await start_batch(client, lines("a", "b"))
        await until(lambda: bool(r.engines[0].requests), DEADLINE_S)
        [lease] = objects.glob(f"leases/*/{batch.id}.json")
        lease.write_bytes(b'{"holder":')
        await until(lambda: r.jobs_metric("quarantined_objects") == 1, DEADLINE_S)
        may_answer.set()
        async with asyncio.timeout(DEADLINE_S):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert set(await results(client, batch.output_file_id)) == {"a", "b"}
        assert r.metric("task_restarts_total") == 0
        assert "a copy is kept as quarantine/leases_" in caplog.text


async def test_a_batch_s_own_malformed_record_is_put_aside(tmp_path: Path) -> None:
    async def script(connection: Connection, request: Received) -> None:
        await asyncio.Event().wait()

    async with stored(tmp_path, [FakeEngine(script=script)], {"lease_s": 1.5}) as r, official(r) as client:
        bad = await start_batch(client, lines("a"))
        await until(lambda: bool(r.engines[0].requests), DEADLINE_S)
        [document] = (tmp_path / "storage" / "objects").glob(f"owners/*/batches/{bad.id}.json")
        document.write_bytes(b"\xff")
        await until(lambda: r.jobs_metric("quarantined_objects") == 1, DEADLINE_S)
        assert [each.id async for each in client.batches.list()] == []
        assert len([each async for each in client.files.list()]) == 1


class ForgetfulStore(DirectoryStore):
    """Makes a replacement, and loses its answer, when it is told to."""

    loses = 0

    async def replace(self, key: str, data: bytes, version: str) -> str:
        made = await super().replace(key, data, version)
        if self.loses and key.startswith("leases/"):
            self.loses -= 1
            raise StorageUnavailable
        return made


async def test_an_answer_that_is_lost_evicts_no_holder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    may_answer = asyncio.Event()
    blobs = ForgetfulStore(tmp_path / "storage")

    async def script(connection: Connection, request: Received) -> None:
        await may_answer.wait()
        await echo(connection, request)

    def prepare(program: BatchProgram) -> None:
        program.store.blobs = program.leases.blobs = blobs

    async with (
        stored(tmp_path, [FakeEngine(script=script)], {"lease_s": 1.5}, prepare=prepare) as r,
        official(r) as client,
    ):
        batch = await start_batch(client, lines("a"))
        await until(lambda: bool(r.engines[0].requests), DEADLINE_S)
        blobs.loses = 2
        await until(lambda: not blobs.loses, DEADLINE_S)
        may_answer.set()
        async with asyncio.timeout(DEADLINE_S):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert len(r.engines[0].requests) == 1, "no other holder has sent it again"
        assert "may have taken over" not in caplog.text


# supervision


async def test_a_part_of_the_router_that_fails_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "RESTART_S", 0.0)
    fails = 2
    async with rig([FakeEngine(script=echo)]) as r:

        async def work() -> None:
            nonlocal fails
            fails -= 1
            if fails >= 0:
                raise ValueError("no good")
            await asyncio.Event().wait()

        r.router.own(work, "usage ledger")
        await until(lambda: fails < 0)
        assert r.metric('task_restarts_total{task="usage ledger"}') == 2
        assert not r.router.stopping.is_set()
        assert (await r.chat()).status_code == 200


async def test_a_router_does_not_go_on_without_discovery(caplog: pytest.LogCaptureFixture) -> None:
    async with rig([FakeEngine()]) as r:

        async def work() -> None:
            raise ValueError("no good")

        r.router.own(work, "discovery")
        await until(r.router.stopping.is_set)
        assert any(record.levelno == logging.CRITICAL for record in caplog.records)


# what an older release has left


def left_behind(tmp_path: Path) -> Callable[[BatchProgram], None]:
    """Write what routers of an earlier release kept themselves: a batch with three of six results, whose lease a router
    holds that is gone."""
    left: dict[str, Any] = json.loads(RELEASED.read_bytes())
    for name, text in left["objects"].items():
        path = tmp_path / "storage" / "objects" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    began = time.monotonic()

    def prepare(program: BatchProgram) -> None:
        program.store.now = lambda: left["written_at"] + 60.0 + time.monotonic() - began

    return prepare


async def test_a_batch_of_an_older_release_goes_on(tmp_path: Path) -> None:
    prepare = left_behind(tmp_path)
    limits = {"lease_s": 1.5}
    async with (
        stored(tmp_path, [FakeEngine(script=echo)], limits, prepare=prepare) as r,
        official(r) as client,
    ):
        [batch] = [each async for each in client.batches.list()]
        async with asyncio.timeout(DEADLINE_S):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert set(await results(client, batch.output_file_id)) == set("012345")
        assert sorted(content_of(request) for request in r.engines[0].requests) == ["3", "4", "5"]
        assert len([each async for each in client.files.list()]) == 2


async def test_a_response_of_an_older_release_is_continued(tmp_path: Path) -> None:
    async def whole(connection: Connection, _: Received) -> None:
        connection.answer(
            200, b'{"id":"resp_1","status":"completed","output":[],"created_at":1,"model":"tiny"}'
        )

    prepare = left_behind(tmp_path)
    async with stored(tmp_path, [FakeEngine(script=whole)], prepare=prepare) as r:
        [name] = [path.stem for path in (tmp_path / "storage").rglob("resp_*.json")]
        assert (await r.http.get(f"/v1/responses/{name}")).json()["output"][0]["content"][0][
            "text"
        ] == "hello"
        asked = {"model": MODEL, "input": "second", "previous_response_id": name}
        assert (await r.http.post("/v1/responses", json=asked)).status_code == 200
        assert [item.get("role") for item in r.engines[0].requests[0].json["input"]] == [
            "user",
            "assistant",
            "user",
        ]


# what a client, or the program, does to other accounts

REFUSED_ONE = b'{"error":{"message":"the router sends 65 files already","type":"service_unavailable"}}'
NO_STORAGE = (
    b'{"error":{"message":"m","type":"service_unavailable","param":null,"code":"storage_unavailable"}}'
)


@asynccontextmanager
async def answering(
    answer: Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[str]:
    """A program whose answers are written by `answer`, which gets the head of each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await answer(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def whole(status: str, body: bytes, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


async def endless() -> AsyncIterator[bytes]:
    """The body of a client that sends some bytes, and no more."""
    yield b"some"
    await asyncio.Event().wait()


async def ask(route: BatchClient, method: str = "GET", body: bytes | AsyncIterator[bytes] = b"") -> int:
    async with route.forward(method, "/v1/files", "shop", {}, body) as response:
        await response.read()
        return response.status


async def test_a_download_at_its_client_s_pace_is_no_trial_for_others() -> None:
    clock = [0.0]
    is_well = False

    async def answer(head: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_well:
            writer.write(whole("503 x", NO_STORAGE))
        elif b"content" in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
        else:
            writer.write(whole("200 OK", b"{}"))

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["k"], now=lambda: clock[0])
        for _ in range(batch_client.MAX_FAILURES):
            with pytest.raises(StorageUnavailable):
                await ask(route)
        assert route.is_open
        is_well = True
        clock[0] += batch_client.OPEN_S
        async with route.forward("GET", "/v1/files/a/content", "lab", {}, b""):
            assert await ask(route) == 200
        await route.close()


async def test_an_upload_at_its_client_s_pace_is_no_trial_for_others() -> None:
    clock = [0.0]
    is_well = False

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST"):
            await reader.read()
        elif not is_well:
            writer.write(whole("503 x", NO_STORAGE))
        else:
            writer.write(whole("200 OK", b"{}"))

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["k"], now=lambda: clock[0])
        for _ in range(batch_client.MAX_FAILURES):
            with pytest.raises(StorageUnavailable):
                await ask(route)
        is_well = True
        clock[0] += batch_client.OPEN_S
        is_sending = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            is_sending.set()
            async for piece in endless():
                yield piece

        async def upload() -> None:
            async with route.forward("POST", "/v1/files", "lab", {}, body()):
                pass

        task = asyncio.create_task(upload())
        await asyncio.wait_for(is_sending.wait(), DEADLINE_S)
        assert await ask(route) == 200
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await route.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "begins", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx"]
)
async def test_a_forwarded_request_does_not_wait_for_ever(method: str, begins: bytes) -> None:
    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begins)
        while b"end" not in await reader.read(65536) and method == "POST":
            pass
        await reader.read()

    async def body() -> AsyncIterator[bytes]:
        yield b"end"

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["k"], forward_s=0.05)
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(batch_client.MAX_FAILURES):
                with pytest.raises(StorageUnavailable):
                    await ask(route, method, body() if method == "POST" else b"")
        assert route.is_open is not begins.startswith(b"HTTP/1.1 200")
        await route.close()


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose time a test lets pass."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def test_a_program_that_takes_no_more_of_an_upload_ends_it_and_a_slow_client_does_not() -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(upload_slowly_and_in_vain())


async def upload_slowly_and_in_vain() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    does_read = True
    may_end = asyncio.Event()

    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if does_read:
            await reader.readuntil(b"end")
            writer.write(whole("200 OK", b"{}"))
        else:
            await may_end.wait()

    async def slow() -> AsyncIterator[bytes]:
        yield b"some"
        loop.skipped_s += 2 * DEADLINE_S  # longer than the program may take for a step
        for _ in range(3):  # in which whatever is due by then happens
            await asyncio.sleep(0)
        yield b"end"

    async def large() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 262144

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["k"], forward_s=DEADLINE_S)
        headers = {"content-length": "7"}
        async with route.forward("POST", "/v1/files", "shop", headers, slow()) as response:
            assert response.status == 200
        does_read = False
        asking = asyncio.create_task(ask(route, "POST", large()))
        while not asking.done():
            loop.skipped_s += DEADLINE_S / 100
            await asyncio.sleep(0.001)
        with pytest.raises(StorageUnavailable):
            await asking
        may_end.set()
        await route.close()


async def test_what_one_account_has_too_much_of_is_no_failure_of_the_program() -> None:
    refusal = whole("503 Service Unavailable", REFUSED_ONE)

    async def answer(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal)

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["k"])
        for _ in range(batch_client.MAX_FAILURES + 1):
            with pytest.raises(Unavailable, match="sends 65 files") as refused:
                await ask(route)
            assert (refused.value.code, refused.value.retry_after_s) == (None, 1.0)
            with pytest.raises(Unavailable, match="sends 65 files"):
                await route.call("GET", "/internal/responses/x", "shop")
        refusal = whole("507 x", REFUSED_ONE)
        for _ in range(batch_client.MAX_FAILURES + 1):  # a full disk can be read, and what is there deleted
            with pytest.raises(StorageFull):
                await route.call("POST", "/internal/responses/x", "shop")
        assert not route.is_open
        await route.close()


@pytest.mark.parametrize(
    "head",
    [
        "302 Found\r\nlocation: /x",
        "204 No Content",
        "101 Switching Protocols",
        "999 x",
        "200 OK\r\na: " + "x" * 99_999,
    ],
    ids=["redirect", "no content", "upgrade", "unknown", "large head"],
)
async def test_answers_that_the_program_never_gives_reach_no_client(head: str) -> None:
    async def answer(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\ncontent-length: 0\r\n\r\n".encode())

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["k"], forward_s=1.0)
        with pytest.raises(StorageUnavailable):
            await ask(route)
        await route.close()


async def test_an_upload_is_sent_with_the_key_that_the_program_accepts() -> None:
    accepted = b"old"

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST"):
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(whole("200 OK" if b"Bearer " + accepted in head else "401 Unauthorized", b"{}"))

    async def body() -> AsyncIterator[bytes]:
        yield b"end"

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["new", "old"])
        for key in (b"old", b"new", b"old"):
            accepted = key
            assert await ask(route, "POST", body()) == 200
        await route.close()


async def test_a_response_that_does_not_arrive_holds_its_memory_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "RECORD_S", 0.1)
    async with stored(tmp_path, [FakeEngine()]) as r:
        assert r.jobs is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", r.jobs.port)
        head = f"POST /internal/responses/x HTTP/1.1\r\nhost: x\r\n{ACCOUNT}: lab\r\nauthorization: "
        head += f"{KEY['authorization']}\r\ncontent-length: {app.MAX_RECORD_BYTES}\r\n\r\n"
        writer.write(head.encode())
        assert (await asyncio.wait_for(reader.readline(), DEADLINE_S)).startswith(b"HTTP/1.1 408 ")
        monkeypatch.setattr(app, "RECORD_S", DEADLINE_S)
        route = BatchClient(r.jobs.url, lambda: [internal_key(FLEET_KEY, BATCH_KEY_UID)])
        responses = ResponseStore(route, 86400.0)
        name = responses.new_id()
        given = StoredResponse(
            msgspec.Raw(b'{"id":"%b","status":"completed","created_at":1}' % name.encode()), []
        )
        await responses.add("shop", name, given)
        assert await responses.find("shop", name) is not None
        await route.close()
        writer.close()


async def test_records_of_one_account_that_arrive_slowly_leave_memory_to_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_RECORD_BYTES", 1000)

    async def begin(account: str, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert r.jobs is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", r.jobs.port)
        head = f"POST /internal/responses/x HTTP/1.1\r\nhost: x\r\n{ACCOUNT}: {account}\r\nauthorization: "
        writer.write(f"{head}{KEY['authorization']}\r\ncontent-length: {size}\r\n\r\n".encode())
        return reader, writer

    async with stored(tmp_path, [FakeEngine()]) as r:
        _, first = await begin("shop", 600)
        statuses = []
        for account in ("shop", "lab"):
            async with asyncio.timeout(DEADLINE_S):
                while True:  # until the first one has come
                    reader, writer = await begin(account, 200)
                    writer.write(b"x" * 200)
                    statuses.append((account, (await reader.readline()).split()[1]))
                    writer.close()
                    if account == "lab" or statuses[-1][1] == b"503":
                        break
        assert statuses[-2:] == [("shop", b"503"), ("lab", b"400")], "the latter is read, and is no record"
        first.close()


@pytest.mark.parametrize("kind", ["files", "responses"])
async def test_what_one_account_waits_for_leaves_room_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A key could have hundreds of lists made at once, each of which read thousands of objects, and thousands of
    responses read: all other calls of the storage waited behind them, and routers took the program for one that hangs.
    """
    begun: list[str] = []
    may_go = asyncio.Event()
    monkeypatch.setattr(app, "MAX_LISTINGS", 8)
    monkeypatch.setattr(app, "MAX_RECORDS_ASKED", 8)
    async with stored(tmp_path, [FakeEngine()]) as r:
        assert r.jobs is not None
        answering = r.jobs.files.list if kind == "files" else r.jobs.responses.find

        async def slow(owner: str, *given: Any) -> Any:
            begun.append(owner)
            await may_go.wait()
            return await answering(owner, *given)

        if kind == "files":
            r.jobs.files.list = slow  # type: ignore[method-assign, assignment]
        else:
            r.jobs.responses.find = slow  # type: ignore[method-assign]
        name = "file-" if kind == "files" else "resp_"
        path = (
            "/v1/files"
            if kind == "files"
            else f"/v1/responses/{batch_program.new_id(name, time.time(), 60.0)}"
        )
        mine = [asyncio.ensure_future(r.http.get(path)) for _ in range(6)]
        await until(lambda: sum(each.done() for each in mine) == 2)
        other = {"authorization": "Bearer sk-lab"}
        theirs = asyncio.ensure_future(r.http.get(path, headers=other))
        await until(lambda: len(set(begun)) == 2)
        assert len(begun) == 2, "one of each at a time"
        may_go.set()
        expected = 200 if kind == "files" else 404
        assert (await theirs).status_code == expected
        statuses = [each.status_code for each in await asyncio.gather(*mine)]
        assert sorted(statuses) == sorted([expected] * 4 + [503] * 2)
        assert (await r.http.get(path)).status_code == expected


async def test_requests_of_batches_keep_no_cookies_and_follow_no_redirects() -> None:
    heads: list[bytes] = []

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        if head.startswith(b"POST"):
            await reader.readexactly(2)
        writer.write(whole("307 x", b"{}", "location: /elsewhere\r\nset-cookie: session=shop\r\n"))

    async with (
        answering(answer) as url,
        RouterClient(url.replace("127.0.0.1", "localhost"), lambda: ["k"]) as client,
    ):
        for account in ("shop", "lab"):
            with AnswerMemory().answer() as held:
                assert (await client.post(CHATS, b"{}", account, held)).status == 307
        assert await client.room("m") == 0
    assert [head.split()[1] for head in heads] == [
        CHATS.encode(),
        CHATS.encode(),
        ROOM_PATH.encode() + b"?model=m",
    ]
    assert not any(b"session=shop" in head for head in heads)


async def test_a_proxy_that_answers_for_routers_is_not_a_router(tmp_path: Path) -> None:
    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole("502 Bad Gateway", b"<html></html>"))

    async with answering(answer) as url, RouterClient(url, lambda: ["k"]) as client:
        assert not await client.is_reached()
    key = internal_key(FLEET_KEY, BATCH_KEY_UID)
    async with (
        rig([FakeEngine()], storage=BatchConfig(storage=str(tmp_path))) as r,
        RouterClient(r.router.url, lambda: [key]) as client,
    ):
        assert await client.is_reached()


async def test_an_endless_answer_to_the_question_for_room_is_not_read() -> None:
    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (MAX_ROOM_BYTES + 1))
        await reader.read()

    async with answering(answer) as url, RouterClient(url, lambda: ["k"]) as client:
        began = time.monotonic()
        assert await client.room("m") == 0
        assert time.monotonic() - began < ROOM_S


async def test_a_download_whose_client_has_left_before_it_begins_keeps_no_slot(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        assert r.jobs is not None
        file = await client.files.create(file=("a", b"content"), purpose="batch")
        headers = [
            (name.lower().encode(), value.encode()) for name, value in (KEY | {ACCOUNT: "shop"}).items()
        ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": f"/v1/files/{file.id}/content",
            "raw_path": b"",
            "query_string": b"",
            "headers": headers,
        }

        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            await asyncio.sleep(0)

        for _ in range(MAX_DOWNLOADS):
            await r.jobs.app(dict(scope), receive, send)
        assert (await client.files.content(file.id)).content == b"content"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_client_that_leaves_ends_what_it_reads_and_nothing_that_changes_something(
    method: str,
) -> None:
    seen: list[str] = []
    is_asked, may_answer, has_answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_asked.set()
        waiting = asyncio.create_task(may_answer.wait())
        reading = asyncio.create_task(reader.read(1))
        done, _ = await asyncio.wait({waiting, reading}, return_when=asyncio.FIRST_COMPLETED)
        seen.append("closed" if reading in done else "waits")
        reading.cancel()
        writer.write(whole("200 OK", b"{}"))
        has_answered.set()

    class Leaving:
        """A client that leaves once the program has its request."""

        def attach(self, listener: ClientListener) -> None:
            self.listener = listener

    async with answering(answer) as url:
        route = BatchClient(url, lambda: ["k"])
        routes = ForwardedRoutes(route, lambda *_: None)
        request = Request(method.encode(), b"/v1/files/file-1", [], is_http10=False, keep_alive=True)
        client: Any = Leaving()
        async with asyncio.timeout(DEADLINE_S):
            request.id, request.grant = b"id", ANONYMOUS
            routes.on_request(client, request)
            await is_asked.wait()
            client.listener.on_client_lost()
            if method == "DELETE":
                may_answer.set()
            await has_answered.wait()
        assert seen == (["closed"] if method == "GET" else ["waits"])
        await routes.close()
        await route.close()
