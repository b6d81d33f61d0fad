"""Large bodies, which another process reads while the router serves everyone else; and what is refused unread."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy_protocol.errors import ApiError, Unavailable
from argosy_protocol.response_history import StoredResponse
from argosy_router.auth.accounts import BODY_BYTES_PER_S, Account
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.http.messages import ClientListener, Request
from argosy_router.prefixes import Prompt
from argosy_router.proxy.call import Call, CallDraft, decode_call, is_large
from argosy_router.proxy.decoded_types import Examined
from argosy_router.proxy.ended_response import Fields, FoundResponse, found_response
from argosy_router.proxy.large_bodies import BodyProcess, LargeBodies, serve
from argosy_router.proxy.request_body import LARGE_BODY_BYTES, RoutedEndpoint, TokenEstimate

from .accounts import account
from .fake_engine import MODEL, FakeEngine
from .harness import Rig, StoppedClock, chat, is_settled, raw, read_all, rig, until
from .keyed_rig import keyed, stop_clock
from .raw_requests import HEAD, answer, request_bytes
from .scripted_envoy import envoy

LARGE = "a long talk, " * (LARGE_BODY_BYTES // 12)
PRIVATE = Account(KeyTerms(name="private", cache="private", priority=3), 0.0, b"secret")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "walk")]


class ScriptedProcess:
    """Reads bodies when a test says so."""

    def __init__(self) -> None:
        self.has_ended = False
        self.begun: list[bytes] = []
        self.goes_on = asyncio.Semaphore(0)

    async def read(
        self, endpoint: RoutedEndpoint, body: bytes, has_state: bool, place: Callable[[Examined], CallDraft]
    ) -> Call:
        self.begun.append(body)
        await self.goes_on.acquire()
        raise ApiError(body[:20].decode())

    async def kill(self) -> None:
        self.has_ended = True


class FailingProcess:
    """Finds responses, or ends."""

    def __init__(self, *, fails: bool) -> None:
        self.has_ended = False
        self.fails = fails

    async def find_response(self, answer: bytes, is_event: bool, fields: Fields) -> FoundResponse:
        if self.fails:
            raise EOFError
        return found_response(answer, is_event, fields)

    async def find_record(self, record: bytes, has_output: bool) -> None:
        raise EOFError

    async def kill(self) -> None:
        self.has_ended = True


class Bystander:
    """A client that stays, and to which nothing is said."""

    def attach(self, listener: ClientListener) -> None:
        pass

    def unexpected(self, *_: Any) -> None:
        raise AssertionError("an answer")

    respond = start = send = finish = abort = unexpected


async def read(
    bodies: LargeBodies, r: Rig, endpoint: RoutedEndpoint, request: Request, holder: Account
) -> Any:
    """The call or the refusal of a request whose body another process reads."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    bodies.read(
        Bystander(),
        endpoint,
        request.body,
        holder,
        lambda examined: CallDraft(r.router.fleet, endpoint, request, examined, holder, b""),
        has_state=False,
        on_call=done.set_result,
        on_refused=done.set_result,
    )
    return facts(await done)


def facts(thing: Any) -> Any:
    """All that is known of a call or a refusal, comparable."""
    if isinstance(thing, ApiError):
        return thing.http_status, thing.message, thing.param, thing.code
    if isinstance(thing, (Call, Prompt, TokenEstimate)):
        names = [name for name in dir(thing) if name[0] != "_" and not callable(getattr(thing, name))]
        found = {name: facts(getattr(thing, name)) for name in names}
        if isinstance(thing, Call):
            found["body"] = sorted(json.loads(thing.body, object_pairs_hook=list))
        return found
    return list(thing) if isinstance(thing, (list, tuple)) or hasattr(thing, "frombytes") else thing


def incoming(body: bytes, path: bytes = b"/v1/chat/completions") -> Request:
    headers = [(b"content-type", b"application/json"), (b"x-session-id", b"s")]
    request = Request(b"POST", path, headers, is_http10=False, keep_alive=True)
    request.body = body
    return request


# what another process reads is what this one would

BODIES: list[tuple[RoutedEndpoint, Any]] = [
    ("chat/completions", chat("Größe 🎉 \ud800" * 100)),
    ("chat/completions", chat(stream=True, n=2, max_tokens=5)),
    ("chat/completions", chat(stream=True, stream_options={"include_usage": False})),
    ("chat/completions", chat(cache_salt="own", priority=7, request_id="mine", truncate_prompt_tokens=9)),
    (
        "chat/completions",
        chat(
            tools=TOOLS,
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "walk"}}],
                },
            },
        ),
    ),
    ("chat/completions", chat([{"type": "image_url", "image_url": {"url": "data:,"}}], prompt_cache_key="k")),
    ("completions", {"model": MODEL, "prompt": [[1, 2, 3], [4] * 600], "n": 2, "best_of": 3, "stream": True}),
    ("completions", {"model": "other name", "prompt": "x"}),
    ("embeddings", {"model": MODEL, "input": ["a", "b" * 3000]}),
    ("chat/completions/batch", {"model": MODEL, "messages": [[{"role": "user", "content": "x"}]] * 3}),
    (
        "messages",
        {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "stream": True},
    ),
    ("responses", {"model": MODEL, "input": "x" * 700}),
    ("tokenize", {"model": MODEL, "prompt": "x"}),
    ("chat/completions", chat(model="nobody's")),
    ("chat/completions", chat(model="")),
    ("chat/completions", chat(temperature="hot")),
    ("chat/completions", chat(resume={})),
    ("chat/completions", chat(bootstrap_host="x")),
    ("chat/completions", chat(vllm_xargs={"kv_transfer_params": 1})),
    ("chat/completions", chat(own_field=1)),
    ("completions", {"model": MODEL, "prompt": ["x", [1]]}),
    ("responses", {"model": MODEL, "input": "x", "background": True}),
    ("chat/completions", b'{"messages": [' + b"[" * 5000),
    ("chat/completions", b'{"a": [' + b"1," * 1_100_000 + b"1]}"),
    ("chat/completions", b"\xff"),
    ("chat/completions", b"{}"),
]


@pytest.mark.parametrize("holder", [account(), PRIVATE], ids=["shared", "private"])
@pytest.mark.parametrize("has_foreign", [False, True], ids=["own", "foreign"])
async def test_another_process_finds_what_this_one_finds(holder: Account, has_foreign: bool) -> None:
    second = FakeEngine(has_telemetry=not has_foreign)
    async with rig([FakeEngine(), second], fields={"aliases": ("other name",)}) as r:
        for endpoint, given in BODIES:
            body = given if isinstance(given, bytes) else json.dumps(given).encode()
            path = f"/v1/{endpoint}".encode()
            try:
                call = decode_call(r.router.fleet, endpoint, incoming(body, path), holder)
                if has_foreign:
                    call.reduce_body()
                expected = facts(call)
            except ApiError as error:
                expected = facts(error)
            found = await read(r.router.large_bodies, r, endpoint, incoming(body, path), holder)
            assert found == expected, body[:200]


async def test_a_large_chat_reaches_its_engine_as_it_was_sent() -> None:
    async with rig([FakeEngine()]) as r:
        answers = [await r.chat(LARGE, stream=is_stream) for is_stream in (False, True)]
        assert [answer.status_code for answer in answers] == [200, 200]
        usage = {"stream_options": {"include_usage": True}}
        assert r.engines[0].requests[0].json == chat(LARGE, stream=False)
        assert r.engines[0].requests[1].json == chat(LARGE, stream=True) | usage
        assert r.metric('large_bodies_total{outcome="read"}') == 2
        await r.until(lambda: is_settled(r))
        refused = await r.chat(LARGE, temperature="hot")
        assert refused.json()["error"]["param"] == "temperature"
        assert r.metric('large_bodies_total{outcome="refused"}') == 1
        await r.until(lambda: r.router.server.body_memory.held == 0)
        process = r.router.large_bodies.process
        assert process is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_a_large_request_of_a_gateway_is_read_too() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        assert (await gateway.request(chat(LARGE), pieces=50)).status == 200
        assert r.engines[0].requests[0].json == chat(LARGE)
        assert (await gateway.request(chat(LARGE, temperature="hot"), pieces=50)).status == 400
        assert r.metric('large_bodies_total{outcome="read"}') == 1
        await r.until(lambda: is_settled(r) and r.router.server.body_memory.held == 0)


def test_the_process_ends_with_its_input() -> None:
    answers = io.BytesIO()
    serve(io.BytesIO(), answers)
    assert answers.getvalue() == b""


# who waits


@contextlib.asynccontextmanager
async def scripted(**config: Any) -> AsyncIterator[tuple[Rig, ScriptedProcess]]:
    async with rig([FakeEngine()], **config) as r:
        process = r.router.large_bodies.process = ScriptedProcess()  # type: ignore[assignment]
        yield r, process


async def test_others_are_answered_while_a_large_body_is_read() -> None:
    async with scripted() as (r, process):
        large = asyncio.create_task(r.chat(LARGE))
        await r.until(lambda: bool(process.begun))
        assert (await r.chat()).status_code == 200
        assert not large.done()
        process.goes_on.release()
        assert (await large).status_code == 500


async def test_a_client_that_leaves_has_its_body_read_no_more() -> None:
    async with scripted() as (r, process), raw(r.router) as (_, first), raw(r.router) as (_, second):
        body = request_bytes(content=LARGE)
        first.write(body)
        await r.until(lambda: len(process.begun) == 1)
        second.write(body)
        await r.until(lambda: r.router.server.body_memory.held > 2 * LARGE_BODY_BYTES)
        for writer in (first, second):
            writer.transport.abort()
        await r.until(lambda: r.router.server.body_memory.held == 0)
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == "large body"]
        await r.until(lambda: sum(not task.done() for task in tasks) == 1)  # the other has let go of its body
        process.goes_on.release()
        large = asyncio.create_task(r.chat(LARGE + "third"))
        await r.until(lambda: len(process.begun) == 2)
        assert b"third" in process.begun[1]
        process.goes_on.release()
        assert (await large).status_code == 500
        assert not r.engines[0].requests


async def test_accounts_take_turns() -> None:
    process = ScriptedProcess()
    bodies = LargeBodies()
    bodies.process = process  # type: ignore[assignment]
    one, other = account("one"), account("other")
    refused: list[str] = []
    for holder, body in ((one, b"1a"), (one, b"1b"), (one, b"1c"), (other, b"2a"), (other, b"2b")):
        bodies.read(
            Bystander(),
            "chat/completions",
            body,
            holder,
            lambda _: pytest.fail("not placed"),
            has_state=False,
            on_call=lambda _: pytest.fail("no call"),
            on_refused=lambda error: refused.append(error.message),
        )
    await until(lambda: bool(process.begun))
    for _ in range(5):
        process.goes_on.release()
    await until(lambda: len(refused) == 5)
    assert refused == ["1a", "2a", "1b", "2b", "1c"]
    await bodies.close()


# what becomes of the process


@pytest.mark.parametrize("num_failures", [0, 1, 2])
async def test_a_large_response_is_read_by_a_new_process_if_one_fails(num_failures: int) -> None:
    text = json.dumps({"id": "resp_1", "status": "completed", "x": LARGE}).encode()
    event = b'event: response.completed\ndata: {"response":%b}\n\n' % text
    started: list[FailingProcess] = []

    async def start() -> FailingProcess:
        started.append(FailingProcess(fails=len(started) < num_failures))
        return started[-1]

    bodies = LargeBodies(start)
    found = await bodies.find_response("owner", event, True, {"store": b"true"})
    assert [process.has_ended for process in started] == [each.fails for each in started]
    if num_failures < 2:
        assert (found.is_ended, json.loads(bytes(found.response_in(event)))["store"]) == (True, True)
        assert json.loads(found.own_event(event).partition(b"data: ")[2])["response"]["x"] == LARGE
    else:
        assert (found.is_ended, found.end) == (False, 0)
    await bodies.close()


RESPONSE = {"id": "resp_1", "status": "completed", "created_at": 7.0, "background": True, "x": LARGE}
PARTS = [{"type": "output_text", "text": "Größe", "annotations": [], "logprobs": []}]
OUTPUT = [
    {"type": "message", "id": f"msg_1_{number}", "role": "assistant", "content": PARTS} for number in range(3)
]


@pytest.mark.parametrize("is_compact", [True, False], ids=["ours", "written otherwise"])
@pytest.mark.parametrize("has_output", [False, True])
async def test_a_large_record_is_read_as_this_process_would(has_output: bool, is_compact: bool) -> None:
    items = [
        {"id": f"msg_{number}", "type": "message", "role": "user", "content": "hi"} for number in range(9000)
    ]
    encoded = [
        json.dumps(each, ensure_ascii=False).encode() for each in ({**RESPONSE, "output": OUTPUT}, *items)
    ]
    record = StoredResponse(msgspec.Raw(encoded[0]), [msgspec.Raw(item) for item in encoded[1:]], "runner")
    data = record.encoded() if is_compact else record.encoded() + b"\n"
    bodies = LargeBodies()
    read = await bodies.read_record("owner", data, has_output)
    assert bodies.process is not None
    state = record.state()
    if is_compact and not has_output:
        state.output = []
    assert read.state() == state
    assert (bytes(read.response), read.runner) == (encoded[0], "runner")
    assert [bytes(item) for item in read.items] == encoded[1:]
    assert read.encoded() == record.encoded()
    assert read.size >= sum(map(len, encoded))
    await bodies.close()


async def test_a_client_that_leaves_while_its_record_is_read_leaves_the_process_to_others() -> None:
    """The process was ended, and others waited for a new one: a key could have that happen over and over."""
    begun, may_go = asyncio.Event(), asyncio.Event()

    class SlowProcess(FailingProcess):
        async def find_response(self, answer: bytes, is_event: bool, fields: Fields) -> FoundResponse:
            begun.set()
            await may_go.wait()
            return await super().find_response(answer, is_event, fields)

    process = SlowProcess(fails=False)

    async def start() -> SlowProcess:
        return process

    bodies = LargeBodies(start)
    large = json.dumps({**RESPONSE, "instructions": "x" * LARGE_BODY_BYTES}).encode()
    leaving = asyncio.create_task(bodies.find_response("leaving", large, False, {}))
    await begun.wait()
    leaving.cancel()
    staying = asyncio.create_task(bodies.find_response("staying", large, False, {}))
    may_go.set()
    assert (await staying).end == len(large)
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert not process.has_ended
    await bodies.close()
    assert process.has_ended


async def test_a_large_record_is_not_read_here_if_the_process_fails() -> None:
    record = StoredResponse(msgspec.Raw(json.dumps(RESPONSE).encode()), []).encoded()
    process = FailingProcess(fails=True)

    async def start() -> FailingProcess:
        return process

    bodies = LargeBodies(start)
    with pytest.raises(Unavailable):
        await bodies.read_record("owner", record, True)
    assert process.has_ended
    for broken in (b"{", b'{"response":1}', b'{"response":' + b"[" * 9000 + b"]" * 9000 + b',"items":"x"}'):
        with pytest.raises(ValueError, match=r"JSON|Input|items|nests"):
            await bodies.read_record("owner", broken, True)
    await bodies.close()


async def test_a_process_that_dies_costs_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.chat(LARGE)).status_code == 200
        process = r.router.large_bodies.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        large = asyncio.create_task(r.chat(LARGE))
        await r.until(lambda: r.router.server.body_memory.held > LARGE_BODY_BYTES)
        with caplog.at_level(logging.ERROR):
            os.kill(process.pid, signal.SIGKILL)
            refused = await large
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "large requests has failed" in caplog.text
        assert r.metric('large_bodies_total{outcome="unavailable"}') == 1
        assert (await r.chat(LARGE)).status_code == 200


async def test_a_process_that_died_between_two_requests_costs_none() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.chat(LARGE)).status_code == 200
        process = r.router.large_bodies.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await r.until(lambda: process.has_ended)
        assert (await r.chat(LARGE)).status_code == 200


async def test_where_no_process_can_be_started_large_requests_are_told_to_retry() -> None:
    async def fails() -> BodyProcess:
        raise OSError("no more processes")

    async with rig([FakeEngine()]) as r:
        bodies = LargeBodies(fails)
        status, message, *_ = await read(bodies, r, "chat/completions", incoming(b"{}"), account())
        assert status == 503
        assert "retry" in message
        await bodies.close()


def test_whose_larger_bodies_are_read_elsewhere() -> None:
    holder, small, medium, large = account(), b"x" * 10_000, b"x" * 200_000, b"x" * (LARGE_BODY_BYTES + 1)
    assert is_large(large, holder, 0.0)
    at_once = sum(not is_large(medium, holder, 0.0) for _ in range(100))
    assert at_once == BODY_BYTES_PER_S // len(medium)
    assert is_large(medium, holder, 0.0)
    assert not is_large(small, holder, 0.0)
    assert not is_large(medium, account(), 0.0), "another account's"
    assert not is_large(medium, holder, 0.5)


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages", "responses"])
async def test_a_short_body_of_many_values_is_read_elsewhere(endpoint: RoutedEndpoint) -> None:
    """Empty parts of a message take a microsecond each: a megabyte of them held the event loop for 350 ms, and bodies
    of 60 KB, which count nowhere, for 20 ms each."""
    field = "input" if endpoint == "responses" else "messages"
    fields = {"model": MODEL, field: [{"role": "user", "content": [{}] * 1000}] * 20}
    if endpoint == "messages":
        fields["max_tokens"] = 5
    async with rig([FakeEngine()]) as r:
        answer = await r.http.post(
            f"/v1/{endpoint}",
            content=json.dumps(fields, separators=(",", ":")),
            headers={"content-type": "application/json"},
        )
        outcomes = ("read", "refused")
        counted = [r.metric(f'large_bodies_total{{outcome="{outcome}"}}') for outcome in outcomes]
        assert sum(counted) == 1, answer.text


# what is refused unread


async def test_a_large_request_over_the_rate_is_refused_before_its_body(tmp_path: Path) -> None:
    async with keyed(tmp_path, "requests_per_minute=1") as r:
        stop_clock(r)
        assert (await r.chat()).status_code == 200
        head = HEAD + b"authorization: Bearer sk-client\r\n"
        for framing in (
            b"content-length: %d" % (4 * LARGE_BODY_BYTES),
            b"content-length: %040d" % (4 * LARGE_BODY_BYTES),
            b"transfer-encoding: chunked",
        ):
            async with raw(r.router) as (reader, writer):
                writer.write(head + framing + b"\r\n\r\n")
                refusal = await read_all(reader)
            assert refusal.startswith(b"HTTP/1.1 429 "), framing
            assert b"rate_limit_exceeded" in refusal
            assert b"\r\nx-ratelimit-remaining-requests: 0\r\n" in refusal
            assert b"\r\nretry-after: " in refusal
        assert r.metric('rate_limited_total{key="client"}') == 3
        assert r.metric('requests_total{code="429"') == 3


async def test_a_short_request_over_the_rate_keeps_its_connection(tmp_path: Path) -> None:
    async with keyed(tmp_path, "requests_per_minute=1") as r, raw(r.router) as (reader, writer):
        stop_clock(r)
        body = b"not read"
        head = HEAD + b"authorization: Bearer sk-client\r\n"
        assert (await r.chat()).status_code == 200
        for _ in range(2):
            writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            status, headers, _ = await answer(reader)
            assert status == 429
            assert "connection" not in headers
        assert r.metric('rate_limited_total{key="client"}') == 2


async def test_a_request_that_is_refused_for_its_content_counts(tmp_path: Path) -> None:
    async with keyed(tmp_path, "requests_per_minute=2 tokens_per_minute=1000") as r:
        stop_clock(r)
        assert (await r.chat(temperature="hot")).status_code == 400
        last = await r.chat(max_tokens=1)
        assert last.status_code == 200
        assert last.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await r.chat(temperature="hot")).status_code == 429


async def test_a_request_that_the_tokens_refuse_costs_no_request(tmp_path: Path) -> None:
    async with keyed(tmp_path, "requests_per_minute=5 tokens_per_minute=1000") as r:
        stop_clock(r)
        assert (await r.chat(max_tokens=900)).status_code == 200
        for _ in range(3):
            refused = await r.chat(max_tokens=999)
            assert refused.status_code == 429
            assert refused.headers["x-ratelimit-remaining-requests"] == "4"


async def test_a_large_request_is_not_refused_for_having_waited(tmp_path: Path) -> None:
    clock = StoppedClock()
    async with keyed(tmp_path, "requests_per_minute=60", clock=clock) as r:
        await r.chat(LARGE)
        process = r.router.large_bodies.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(57):
            assert (await r.chat()).status_code == 200
        large = asyncio.create_task(r.chat(LARGE))
        await r.until(lambda: r.router.server.body_memory.held > LARGE_BODY_BYTES)
        await r.pass_time(2.0)
        assert [(await r.chat()).status_code for _ in range(2)] == [200, 200]
        os.kill(process.pid, signal.SIGCONT)
        assert (await large).status_code == 200


async def test_a_request_that_the_router_cannot_read_costs_no_request(tmp_path: Path) -> None:
    async with keyed(tmp_path, "requests_per_minute=2", clock=StoppedClock()) as r:
        assert (await r.chat(LARGE)).status_code == 200
        process = r.router.large_bodies.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        large = asyncio.create_task(r.chat(LARGE))
        await r.until(lambda: r.router.server.body_memory.held > LARGE_BODY_BYTES)
        os.kill(process.pid, signal.SIGKILL)
        assert (await large).status_code == 503
        assert (await r.chat()).status_code == 200
        assert (await r.chat()).status_code == 429


async def test_a_drain_waits_for_bodies_that_no_connection_waits_for() -> None:
    async with scripted() as (r, process):
        bodies = r.router.large_bodies
        reading = asyncio.create_task(read(bodies, r, "chat/completions", incoming(b"{}"), account()))
        await r.until(lambda: bool(process.begun))
        idle = asyncio.create_task(bodies.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        process.goes_on.release()
        await reading
        await idle
        await bodies.close()
        status, *_ = await read(bodies, r, "chat/completions", incoming(b"{}"), account())
        assert status == 503
