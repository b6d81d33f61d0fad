"""The router as a gateway's endpoint picker, asked by an Envoy that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tracemalloc
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from argosy_batch.config import BatchConfig
from argosy_batch.files_api import MAX_UPLOADS
from argosy_protocol.fleet import FleetDocument, ServiceLimits
from argosy_router import ext_proc
from argosy_router.config import FlowControlLimits, ServerLimits
from argosy_router.gateway import GatewayRequest
from argosy_router.http.limits import AddressGroups

from .fake_engine import MODEL, NORMAL_STREAM, Connection, FakeEngine, Received
from .harness import DEADLINE_S, Rig, UnpausedClock, chat, is_settled, rig, service
from .scripted_envoy import BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX, NONE, STREAMED, envoy

LONG = "a shared prefix " * 200
KEYED: dict[str, Any] = {"api_keys": ("sk-client",), "ext_proc_port": 0}


def port_of(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


# requests that are answered


@pytest.mark.parametrize("request_mode", [FULL_DUPLEX, BUFFERED])
@pytest.mark.parametrize("response_mode", [FULL_DUPLEX, BUFFERED, STREAMED])
async def test_a_unary_request_reaches_the_chosen_replica(request_mode: int, response_mode: int) -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        answer = await gateway.request(chat("hello"), request_mode=request_mode, response_mode=response_mode)
        assert answer.status == 200
        assert answer.endpoint == port_of(r.engines[0])
        assert answer.json["choices"][0]["message"]["content"] == "hello"
        assert answer.headers["x-argosy-replica"] == "r0"
        assert r.engines[0].requests[0].json == chat("hello")
        await r.until(lambda: is_settled(r))
        assert r.metric('requests_total{code="200",model="tiny"}') == 1


@pytest.mark.parametrize("response_mode", [FULL_DUPLEX, BUFFERED, STREAMED])
async def test_a_stream_is_passed_on_whole(response_mode: int) -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        answer = await gateway.request(chat("hi", stream=True), response_mode=response_mode)
        assert answer.body == NORMAL_STREAM
        assert r.engines[0].requests[0].json["stream_options"] == {"include_usage": True}
        await r.until(lambda: is_settled(r))
        assert r.metric('ttft_seconds_count{model="tiny"}') == 1


async def test_a_body_may_come_in_many_pieces() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        body = chat("x" * 200_000)
        answer = await gateway.request(body, pieces=500)
        assert answer.status == 200
        assert r.engines[0].requests[0].json == body
        await r.until(lambda: is_settled(r))
        await r.until(lambda: r.router.server.body_memory.held == 0)


async def test_trailers_end_a_body() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        stream = gateway.open()
        await stream.send_headers()
        await stream.send_body(json.dumps(chat()).encode(), ends=False)
        await stream.send(request_trailers=ext_proc.HttpTrailers())
        await stream.receive("request_headers")
        piece = (await stream.receive("request_body")).request_body.response.body_mutation.streamed_response
        assert not piece.end_of_stream
        await stream.receive("request_trailers")
        await stream.send_response(200, {"content-type": "application/json"})
        await stream.send_response_body(b"{}")
        await stream.send(response_trailers=ext_proc.HttpTrailers())
        await stream.receive("response_trailers")
        assert await stream.call.read() is grpc.aio.EOF
        await r.until(lambda: is_settled(r))


async def test_a_gateway_without_configuration_is_taken_for_full_duplex() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        assert (await gateway.request(chat(), has_config=False)).status == 200


async def test_usage_in_a_response_is_learnt() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        await gateway.request(chat())
        await r.until(lambda: is_settled(r))
        assert r.metric('prompt_tokens_total{model="tiny",replica="r0"}') == 10


async def test_routes_without_a_replica_are_answered_by_the_router() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        answer = await gateway.request(b"", path="/v1/models", method="GET")
        assert answer.status == 200
        assert [card["id"] for card in answer.json["data"]] == [MODEL]
        assert not r.engines[0].requests


async def test_an_upload_that_a_gateway_forwards_takes_no_place_of_another(tmp_path: Path) -> None:
    form = "multipart/form-data; boundary=b"
    async with rig([FakeEngine()], ext_proc_port=0, storage=BatchConfig(storage=str(tmp_path))) as r:
        async with envoy(r) as gateway:
            for _ in range(MAX_UPLOADS):
                sent = await gateway.request(b"x", path="/v1/files", headers={"content-type": form})
                assert (sent.status, "own port" in sent.json["error"]["message"]) == (404, True)
        file: Any = {"file": ("a.jsonl", b"{}")}
        kept = await r.http.post("/v1/files", files=file, data={"purpose": "batch"})
        assert kept.status_code == 200, kept.text


@pytest.mark.parametrize("keeps_responses", [False, True])
async def test_the_tokens_of_a_response_are_counted_by_a_replica(
    tmp_path: Path, keeps_responses: bool
) -> None:
    files = BatchConfig(storage=str(tmp_path) if keeps_responses else "")
    async with rig([FakeEngine()], ext_proc_port=0, storage=files) as r, envoy(r) as gateway:
        path = "/v1/responses/input_tokens"
        answer = await gateway.request({"model": MODEL, "input": "hi"}, path=path)
        assert answer.endpoint == port_of(r.engines[0])
        assert r.engines[0].requests[0].path == path
        stored = await gateway.request(b"", path="/v1/responses/resp_1", method="GET")
        assert (stored.status, stored.endpoint) == (404, "")
        assert "own port" in stored.json["error"]["message"]


# the choice


async def test_requests_with_the_same_prefix_go_to_the_same_replica() -> None:
    async with rig([FakeEngine() for _ in range(4)], ext_proc_port=0) as r, envoy(r) as gateway:
        first = await gateway.request(chat(LONG + "one"))
        for number in range(8):
            answer = await gateway.request(chat(f"{LONG}{number}"))
            assert answer.endpoint == first.endpoint
        assert answer.headers["x-argosy-route"] in ("cached", "predicted")
        direct = await r.chat(LONG + "direct")  # the main port has the same index
        assert direct.headers["x-argosy-replica"] == first.headers["x-argosy-replica"]


async def test_picks_see_each_other_before_the_responses() -> None:
    async with rig([FakeEngine(), FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        streams = [gateway.open() for _ in range(2)]
        for number, stream in enumerate(streams):
            assert await stream.ask([json.dumps(chat(f"{number} " * 3000)).encode()]) is None
        assert {stream.destination for stream in streams} == {port_of(engine) for engine in r.engines}
        assert r.router.requests.inflight == 2
        for stream in streams:
            stream.call.cancel()
        await r.until(lambda: is_settled(r))


async def test_a_replica_that_left_is_not_picked() -> None:
    async with rig([FakeEngine(), FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        first = await gateway.request(chat(LONG))
        left = next(engine for engine in r.engines if port_of(engine) != first.endpoint)
        r.discovery.set(FleetDocument(services=(service([left]),)))
        again = await gateway.request(chat(LONG))
        assert again.endpoint == port_of(left)


async def test_a_dead_replica_is_not_picked_again() -> None:
    async with rig([FakeEngine(), FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        first = await gateway.request(chat(LONG))
        dead = next(engine for engine in r.engines if port_of(engine) == first.endpoint)
        await dead.stop()
        replica = r.replica(r.engines.index(dead))

        async def picked() -> str:
            return (await gateway.request(chat(LONG))).endpoint

        async with asyncio.timeout(60):
            while await picked() == first.endpoint:
                pass
        assert not (replica.is_available and replica.health.is_healthy)
        for _ in range(5):
            assert await picked() != first.endpoint
        await r.until(lambda: is_settled(r))


async def test_a_gateway_may_restrict_the_choice() -> None:
    async with rig([FakeEngine() for _ in range(3)], ext_proc_port=0) as r, envoy(r) as gateway:
        for engine in r.engines:
            answer = await gateway.request(chat(LONG), subset=[port_of(engine)])
            assert answer.endpoint == port_of(engine)
        for subset in ([], ["10.0.0.1:80"]):
            refused = await gateway.request(chat(LONG), subset=subset)
            assert (refused.status, refused.endpoint) == (503, "")


@pytest.mark.parametrize("has_limit", [True, False])
async def test_a_request_waits_for_the_replicas_that_its_gateway_allows(has_limit: bool) -> None:
    """Like one that may go anywhere: in its account's turn, and until its time has passed."""
    engines = [FakeEngine(hello={"max_num_seqs": 1}) for _ in range(2)]
    fields = {"limits": ServiceLimits(max_inflight_per_replica=1)} if has_limit else {}
    limits = FlowControlLimits(max_queued_requests=2, queue_timeout_s=60.0)
    async with rig(engines, ext_proc_port=0, flow_control=limits, fields=fields) as r, envoy(r) as gateway:
        only = [port_of(engines[0])]
        first = gateway.open(subset=only)
        assert await first.ask([json.dumps(chat()).encode()]) is None
        waiting = []
        for place in range(2):
            waiting.append(asyncio.create_task(gateway.request(chat("waits"), subset=only)))
            await r.until(lambda place=place: r.router.requests.inflight == 2 + place)
        anywhere = await gateway.request(chat("goes elsewhere"), subset=[*only, port_of(engines[1])])
        assert (anywhere.status, anywhere.endpoint) == (200, port_of(engines[1]))
        refused = await gateway.request(chat("surplus"), subset=only)
        assert (refused.status, refused.endpoint) == (429, "")
        assert not any(task.done() for task in waiting)
        first.call.cancel()
        for task in waiting:
            answer = await task
            assert (answer.status, answer.endpoint) == (200, port_of(engines[0]))
        await r.until(lambda: is_settled(r))


# keys and headers


async def test_keys_are_checked_and_replaced() -> None:
    engine = FakeEngine(key="internal")
    fields = {"internal_key": "internal"}
    async with rig([engine], fields=fields, **KEYED) as r, envoy(r) as gateway:
        sent = {"authorization": "Bearer sk-client", "x-data-parallel-rank": "1", "user-agent": "sdk/1"}
        answer = await gateway.request(chat(), headers=sent)
        assert answer.status == 200
        got = engine.requests[0].headers
        assert got["authorization"] == "Bearer internal"
        assert got["user-agent"] == "sdk/1"
        assert got["x-envoy-expected-rq-timeout-ms"] == "15000"
        assert "x-data-parallel-rank" not in got


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
async def test_a_request_without_a_key_is_refused_before_its_body(mode: int) -> None:
    async with rig([FakeEngine()], **KEYED) as r, envoy(r) as gateway:
        stream = gateway.open(request_mode=mode)
        await stream.send_headers()
        reply = await stream.receive("request_headers")
        assert reply.immediate_response.status.code == 401
        assert json.loads(reply.immediate_response.body)["error"]["type"]
        assert await stream.call.read() is grpc.aio.EOF
        assert r.router.requests.inflight == 0


# refusals


async def refusal(r: Rig, body: Any, **given: Any) -> tuple[int, dict[str, Any]]:
    async with envoy(r) as gateway:
        answer = await gateway.request(body, **given)
    assert not answer.endpoint
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    await r.until(lambda: is_settled(r))
    await r.until(lambda: r.router.server.body_memory.held == 0)
    return answer.status, answer.json["error"]


@pytest.mark.parametrize(
    ("body", "given", "status"),
    [
        (b"{not json", {}, 400),
        (b"", {}, 400),
        ({**chat(), "model": "other"}, {}, 404),
        (chat(), {"path": "/v1/unknown"}, 404),
        (chat(), {"path": "/v1/files"}, 404),
        (chat(), {"method": "PUT"}, 405),
        (chat(), {"headers": {"content-type": "text/plain"}}, 415),
        (chat(), {"request_mode": NONE}, 501),
        (chat(), {"request_mode": BUFFERED_PARTIAL}, 501),
        (chat(), {"headers": {"x-long": "x" * 40_000}}, 431),
        (chat(), {"headers": {"user-agent": "a\r\nauthorization: Bearer b"}}, 400),
    ],
)
async def test_refusals_have_the_shape_of_the_api(body: Any, given: dict[str, Any], status: int) -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r:
        got, error = await refusal(r, body, **given)
        assert got == status
        assert {"message", "type", "param", "code"} <= set(error)


async def test_anthropics_api_gets_its_own_shape() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        answer = await gateway.request(b"{", path="/v1/messages")
        assert answer.status == 400
        assert answer.json["type"] == "error"


async def test_without_a_replica_the_answer_is_503() -> None:
    async with rig([], ext_proc_port=0) as r:
        status, error = await refusal(r, chat())
        assert status == 503
        assert error["type"] == "service_unavailable"


async def test_a_full_queue_answers_429_and_a_queued_request_its_pick() -> None:
    limits = FlowControlLimits(max_queued_requests=1, queue_timeout_s=60.0)
    async with limited(limits) as r, envoy(r) as gateway:
        first = gateway.open()
        assert await first.ask([json.dumps(chat()).encode()]) is None
        queued = asyncio.create_task(gateway.request(chat("queued")))
        await r.until(lambda: r.router.requests.inflight == 2)
        refused = await gateway.request(chat("surplus"))
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert not queued.done()
        first.call.cancel()
        assert (await queued).status == 200
        await r.until(lambda: is_settled(r))


async def test_a_queued_request_leaves_with_its_stream() -> None:
    async with limited(FlowControlLimits()) as r, envoy(r) as gateway:
        first, second = gateway.open(), gateway.open()
        assert await first.ask([json.dumps(chat()).encode()]) is None
        await second.send_headers()
        await second.send_body(json.dumps(chat()).encode())
        await r.until(lambda: r.router.requests.inflight == 2)
        second.call.cancel()
        await r.until(lambda: r.router.requests.inflight == 1)
        first.call.cancel()
        await r.until(lambda: is_settled(r))


def limited(limits: FlowControlLimits) -> Any:
    return rig(
        [FakeEngine()],
        ext_proc_port=0,
        flow_control=limits,
        fields={"limits": ServiceLimits(max_inflight_per_replica=1)},
    )


# bounds and hostile peers


async def test_a_body_over_the_limit_is_refused_while_it_comes() -> None:
    limits = ServerLimits(max_body_bytes=10_000, max_inflight_bytes=10_000)
    async with rig([FakeEngine()], ext_proc_port=0, server=limits) as r, envoy(r) as gateway:
        stream = gateway.open()
        await stream.send_headers()
        await stream.send_body(b"x" * 9_000, ends=False)
        await r.until(lambda: r.router.server.body_memory.held == 9_000)
        await stream.send_body(b"x" * 9_000, ends=False)
        reply = await stream.receive("request_headers")
        assert reply.immediate_response.status.code == 413
        await r.until(lambda: r.router.server.body_memory.held == 0)


async def test_a_body_in_tiny_pieces_takes_the_memory_of_its_bytes() -> None:
    size = 100_000
    async with rig([FakeEngine()], ext_proc_port=0) as r:
        assert r.router.gateway is not None
        head = [(b":method", b"POST"), (b":path", b"/v1/chat/completions")]
        request = GatewayRequest(r.router.gateway.intake, head, None)
        request.open()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(size // 2):
                request.feed(b"%02d" % (number % 100))
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert r.router.server.body_memory.held == size
        assert held < 2 * size
        request.close()
        await r.until(lambda: r.router.server.body_memory.held == 0)


async def test_a_body_that_never_ends_is_refused() -> None:
    limits = ServerLimits(body_timeout_s=2 * UnpausedClock.LONGEST_STEP_S)
    async with rig([FakeEngine()], ext_proc_port=0, server=limits) as r, envoy(r) as gateway:
        stream = gateway.open()
        await stream.send_headers()
        await stream.send_body(b"{", ends=False)
        reply = await stream.receive("request_headers")
        assert reply.immediate_response.status.code == 408
        await r.until(lambda: r.router.server.body_memory.held == 0)


async def test_a_gateway_that_falls_silent_is_cut() -> None:
    async with rig([FakeEngine()], ext_proc_port=0, request_timeout_s=1.0) as r, envoy(r) as gateway:
        stream = gateway.open()
        assert await stream.ask([json.dumps(chat()).encode()]) is None
        assert await stream.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await r.until(lambda: is_settled(r))


@pytest.mark.parametrize("when", ["headers", "body", "picked", "response", "events"])
async def test_a_cancelled_stream_frees_everything(when: str) -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        stream = gateway.open()
        body = json.dumps(chat(stream=True)).encode()
        await stream.send_headers()
        if when != "headers":
            await stream.send_body(body[:10], ends=False)
            await r.until(lambda: r.router.server.body_memory.held > 0)
        if when in ("picked", "response", "events"):
            await stream.send_body(body[10:])
            assert await stream.destination_reply() is None
            assert r.router.requests.inflight == 1
        if when in ("response", "events"):
            await stream.send_response(200, {"content-type": "text/event-stream"})
        if when == "events":
            await stream.send_response_body(NORMAL_STREAM[:50])
        stream.call.cancel()
        await r.until(lambda: is_settled(r) and r.router.server.body_memory.held == 0)
        assert (await gateway.request(chat())).status == 200


@pytest.mark.parametrize(
    "message",
    [
        ext_proc.ProcessingRequest(),
        ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders()),
        ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b"{}")),
    ],
)
async def test_messages_out_of_turn_end_the_stream(message: Any) -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        stream = gateway.open()
        await stream.call.write(message)
        assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        inside = gateway.open()
        assert await inside.ask([json.dumps(chat()).encode()]) is None
        await inside.call.write(message)
        assert await inside.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await r.until(lambda: is_settled(r))


@pytest.mark.parametrize("number", [ext_proc.MAX_HEADERS + 1, ext_proc.MAX_BESIDE_BODY_BYTES])
async def test_messages_with_very_many_headers_are_not_read(number: int) -> None:
    """Whoever reached the port could send thirty megabytes of empty ones, without a key: five seconds of the event loop
    and three gigabytes."""
    headers = ext_proc.HttpHeaders()
    for _ in range(number):
        headers.headers.headers.add()
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        stream = gateway.open()
        await stream.call.write(ext_proc.ProcessingRequest(request_headers=headers))
        assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await gateway.request(chat())).status == 200


async def test_connections_that_say_nothing_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them kept a descriptor for two minutes, of which the main port has need."""
    monkeypatch.setattr(ext_proc, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(ext_proc, "HANDSHAKE_TIMEOUT_MS", 100)
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        assert r.router.gateway is not None
        opened = [await asyncio.open_connection("127.0.0.1", r.router.gateway.port) for _ in range(16)]
        for reader, _ in opened:
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the end of the connection
        for _, writer in opened:
            writer.close()
        assert (await gateway.request(chat())).status == 200


def test_a_large_body_is_read_and_what_is_beside_it_is_bounded() -> None:
    body = ext_proc.HttpBody(body=b"x" * (4 << 20), end_of_stream=True)
    message = ext_proc.ProcessingRequest(request_body=body)
    message.metadata_context.filter_metadata.add(key="envoy.lb")
    assert ext_proc.parse(message.SerializeToString()) == message
    message.metadata_context.filter_metadata.add(key="k" * ext_proc.MAX_BESIDE_BODY_BYTES)
    with pytest.raises(ext_proc.MessageTooLarge):
        ext_proc.parse(message.SerializeToString())


class SlowSender:
    """A peer that opens streams by HTTP/2, and sends of each first message as much as it may, but not its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._windows: dict[int, int] = {0: 65535}
        self._rest: dict[int, int] = {}
        self._initial = 65535
        self.sent = 0

    def _write(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._writer.write(head + payload)

    async def open(self, streams: int, message_bytes: int) -> None:
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        await self.fence()
        path = "/".join(("", *ext_proc.PROCESS)).encode()
        fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"a"}
        fields |= {b"content-type": b"application/grpc", b"te": b"trailers"}
        block = b"".join(
            b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
            for name, value in fields.items()
        )
        for number in range(1, 2 * streams, 2):
            self._windows[number] = self._initial
            self._rest[number] = message_bytes + 4  # all but one byte
            self._write(1, 4, number, block)
            self._send(number, b"\0" + message_bytes.to_bytes(4, "big"))

    def _send(self, stream: int, data: bytes) -> None:
        self._write(0, 0, stream, data)
        self.sent += len(data)
        self._windows[0] -= len(data)
        self._windows[stream] -= len(data)
        self._rest[stream] -= len(data)

    def push(self) -> None:
        """Send what the windows allow."""
        for stream in list(self._windows)[1:]:
            while (size := min(16384, self._windows[stream], self._windows[0], self._rest[stream])) > 0:
                self._send(stream, bytes(size))

    async def fence(self) -> None:
        """Read until the peer has seen what was sent."""
        self._write(4, 0, 0, b"")
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == 8 and stream in self._windows:
                self._windows[stream] += int.from_bytes(payload, "big")
            elif kind == 4 and not flags & 1:
                settings = {payload[at + 1]: payload[at + 2 : at + 6] for at in range(0, len(payload), 6)}
                self._initial = int.from_bytes(settings.get(4, self._initial.to_bytes(4, "big")), "big")
                self._write(4, 1, 0, b"")
            elif kind == 6:
                self._write(6, 1, 0, payload)
            elif kind == 4:
                return


async def test_of_first_messages_few_are_received_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reached the port could have it hold one of 33 MB on each of any number of streams, without a key."""
    monkeypatch.setattr(ext_proc, "FIRST_MESSAGE_S", DEADLINE_S)
    limits = ServerLimits(max_body_bytes=1 << 20, max_inflight_bytes=1 << 20, header_timeout_s=DEADLINE_S)
    message_bytes, streams = 2 << 20, 64
    async with rig([FakeEngine()], ext_proc_port=0, server=limits) as r, envoy(r) as gateway:
        assert r.router.gateway is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", r.router.gateway.port)
        sender = SlowSender(reader, writer)
        try:
            await sender.open(streams, message_bytes)
            async with asyncio.timeout(DEADLINE_S):
                while sender.sent < message_bytes + streams * 1000:
                    sender.push()
                    await sender.fence()
                for _ in range(50):
                    sender.push()
                    await sender.fence()
            assert sender.sent <= 2 * message_bytes + streams * ext_proc.UNREAD_BYTES
        finally:
            writer.close()
        assert (await gateway.request(chat())).status == 200


async def test_streams_without_a_first_message_end_and_others_are_served() -> None:
    limits = ServerLimits(header_timeout_s=0.1, max_inflight_bytes=32 << 20)
    async with rig([FakeEngine()], ext_proc_port=0, server=limits) as r, envoy(r) as gateway:
        codes = [await stream.call.code() for stream in [gateway.open() for _ in range(8)]]
        assert set(codes) <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert grpc.StatusCode.DEADLINE_EXCEEDED in codes

        async def is_served() -> bool:
            try:
                return (await gateway.request(chat())).status == 200
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return False  # this process, which sends it as well, was paused for longer than it may take

        async with asyncio.timeout(DEADLINE_S):
            while not all(await asyncio.gather(*(is_served() for _ in range(32)))):
                pass


async def test_addresses_have_a_part_of_the_places_for_first_messages() -> None:
    firsts = ext_proc.FirstMessages(8 << 20, 1 << 20, AddressGroups((ip_network("10.0.0.0/8"),)))
    slow = "ipv4:192.0.2.1:1"
    async with contextlib.AsyncExitStack() as held:
        for number in range(2):
            await held.enter_async_context(firsts.place(f"{slow}{number}", DEADLINE_S))
        with pytest.raises(ext_proc.TooManyUnread):
            async with firsts.place(slow, 0.0):
                pass
        for peer in ("ipv6:%5B2001:db8::1%5D:7", *["ipv4:10.0.0.1:7"] * 5):
            await held.enter_async_context(firsts.place(peer, DEADLINE_S))
        with pytest.raises(ext_proc.TooManyUnread):
            async with firsts.place("ipv4:192.0.2.2:1", 0.0):
                pass
    async with firsts.place(slow, 0.0):
        pass


async def test_bytes_that_are_no_message_end_the_stream() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        assert r.router.gateway is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{r.router.gateway.port}") as channel:
            call = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
            await call.write(b"\xff\xff\xff\xff")
            assert await call.code() is not grpc.StatusCode.OK
        assert (await gateway.request(chat())).status == 200


async def test_streams_over_the_limit_are_refused_and_the_others_served() -> None:
    limits = ServerLimits(max_connections=4)
    async with rig([FakeEngine()], ext_proc_port=0, server=limits) as r, envoy(r) as gateway:
        held = []
        for _ in range(
            4
        ):  # one after the other: a stream that says nothing while others are asked is cut in the end
            held.append(gateway.open())
            assert await held[-1].ask([json.dumps(chat()).encode()]) is None
        surplus = [gateway.open() for _ in range(50)]
        for stream in surplus:
            assert await stream.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert r.router.requests.inflight == 4
        for stream in held:
            stream.call.cancel()
        await r.until(lambda: is_settled(r))
        assert (await gateway.request(chat())).status == 200


async def test_an_engines_error_reaches_the_client_and_cools_the_replica_down() -> None:
    async def busy(connection: Connection, _: Received) -> None:
        connection.answer(503, b'{"error":{"message":"full"}}')

    async with rig([FakeEngine(script=busy), FakeEngine()], ext_proc_port=0) as r, envoy(r) as gateway:
        busy_port = port_of(r.engines[0])
        refused = await gateway.request(chat(), subset=[busy_port])
        assert (refused.status, refused.endpoint) == (503, busy_port)
        for number in range(5):
            assert (await gateway.request(chat(str(number)))).endpoint != busy_port
        await r.until(lambda: is_settled(r))


# the port


async def test_health_follows_readiness() -> None:
    async with rig([FakeEngine()], ext_proc_port=0) as r:
        assert r.router.gateway is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{r.router.gateway.port}") as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=ext_proc.HealthCheckRequest.SerializeToString,
                response_deserializer=ext_proc.HealthCheckResponse.FromString,
            )

            async def status(name: str) -> int:
                return (await check(ext_proc.HealthCheckRequest(service=name))).status

            names = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
            assert {await status(name) for name in (*names, "liveness")} == {1}
            r.router.application.is_draining = True
            assert {await status(name) for name in names} == {2}
            assert await status("liveness") == 1
            with pytest.raises(grpc.aio.AioRpcError):
                await status("other")


def test_a_router_without_the_port_imports_no_grpc() -> None:
    code = (
        "import sys, argosy_router.main, argosy_router.server\n"
        "assert not {'grpc', 'google.protobuf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "from argosy_router.main import main\n"
        "sys.exit(main(['--replica', 'http://127.0.0.1:1', '--port', '0', '--admin-port', '-1', "
        "'--ext-proc-port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--ext-proc-port needs gRPC" in done.stderr
