"""Migration of streams whose replica dies: the client gets the undisturbed stream or an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy_protocol.errors import InternalError, Unavailable
from argosy_protocol.fleet import ServiceLimits
from argosy_protocol.headers import IN_COMMENTS, RESPONSE_ID, RESUME
from argosy_protocol.openai import CompletionRequest, StreamOptions
from argosy_router.config import UpstreamLimits
from argosy_router.http.sse import without_token_ids
from argosy_router.proxy import answer_tokens
from argosy_router.proxy.answer_tokens import Transcript
from argosy_router.proxy.decoded_types import StreamShape
from argosy_router.proxy.request_body import resumable_shape

from .fake_engine import DONE, MODEL, Connection, FakeEngine, Received
from .harness import DEADLINE_S, Rig, StoppedClock, chat, rig
from .resumable_stream import ResumableStream, events, fold

USAGE = {"stream_options": {"include_usage": True}}


def received(path: str, body: dict[str, Any], resume: str = IN_COMMENTS) -> Received:
    headers = {RESPONSE_ID: "same", RESUME: resume}
    return Received("POST", path, headers, json.dumps(body).encode())


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x", "stream": True, **fields}


async def ask(r: Rig, path: str, body: dict[str, Any]) -> bytes:
    response = await r.http.post(path, json=body, headers={"x-request-id": "same"})
    assert response.status_code == 200, response.text
    return response.content


def is_settled(r: Rig) -> bool:
    loads = [replica.load for replica in r.router.fleet.replicas()]
    return not r.router.requests.inflight and not any(load.inflight or load.inflight_tokens for load in loads)


CALLS = [
    ("/v1/chat/completions", chat(stream=True)),
    ("/v1/chat/completions", chat(stream=True, n=3, logprobs=True, **USAGE)),
    ("/v1/completions", completion(n=2, **USAGE)),
    ("/v1/completions", completion(prompt=["x", "y"], return_token_ids=True)),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_a_death_at_any_event_leaves_no_trace(path: str, body: dict[str, Any]) -> None:
    stream = events(received(path, body, IN_COMMENTS))
    script = ResumableStream()
    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        whole = fold(await ask(r, path, body))
        assert whole == fold(without_token_ids(b"".join(stream)))
        if not body.get("return_token_ids"):
            assert not any(choice["ids"] for choice in whole["choices"].values())
        for count in range(1, len(stream)):
            boundary = sum(map(len, stream[:count]))
            for life in (boundary, boundary + 1, boundary + len(stream[count]) - 1):
                script.deaths = [life]
                assert fold(await ask(r, path, body)) == whole, life
        await r.until(lambda: is_settled(r))
        assert r.metric("interrupted_streams_total") == 0
        assert r.metric('migrations_total{model="tiny",outcome="failed"}') == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.data(),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["1", IN_COMMENTS]),
    st.sampled_from([1, 200, answer_tokens.PARSED_TOGETHER_BYTES]),
)
def test_transcripts_of_any_pieces_continue_the_stream(
    data: st.DataObject, n: int, has_usage: bool, has_logprobs: bool, resume: str, read_bytes: int
) -> None:
    body = chat(stream=True, n=n, logprobs=has_logprobs, **(USAGE if has_usage else {}))
    path = "/v1/chat/completions"
    stream = events(received(path, body, resume))
    whole = fold(without_token_ids(b"".join(stream)))
    sent: list[bytes] = []
    transcript = Transcript(StreamShape(n, has_usage))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_tokens, "PARSED_TOGETHER_BYTES", read_bytes)
        first, lives = True, data.draw(st.integers(1, 4), label="lives")
        for life in range(lives):
            if not first:
                body_now = json.loads(transcript.continuing(json.dumps(body).encode()))
                stream = events(received(path, body_now, resume))
            first = False
            low = 1 if life == 0 else 0
            cut = (
                len(stream) if life == lives - 1 else data.draw(st.integers(low, len(stream)), label="events")
            )
            while stream[:cut]:
                size = data.draw(st.integers(1, cut), label="read")
                piece = b"".join(stream[:size])
                transcript.add(piece)
                sent.append(piece)
                stream, cut = stream[size:], cut - size
            assert transcript.read()
            if transcript.missing_end is not None:
                sent.append(transcript.missing_end)
                break
    assert fold(without_token_ids(b"".join(sent))) == whole


@pytest.mark.parametrize(
    "events_sent",
    [
        b'data: {"id":"a","created":1,"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n',
        b'data: {"id":"a","created":1,"choices":[{"index":0,"token_ids":null}]}\n\n',
        b'data: {"id":"a","created":1,"choices":[{"index":2,"token_ids":[]}]}\n\n',
        b'data: {"id":"a","created":1,"choices":[{"index":-1,"token_ids":[]}]}\n\n',
        b'data: {"id":"a","created":1,"choices":[{"index":0,"token_ids":[99999999999]}]}\n\n',
        b'data: {"error":{"message":"no"}}\n\n',
        b'data: {"id":"a","created":1,"choices":[{"index":0,"token_ids":[5]}]}\r\n\r\n',
        b': and\ndata: {"id":"a","created":1,"choices":[{"index":0,"token_ids":[5]}]}\n\n',
        b":ids 2 5\n\n",
        b":ids -1 5\n\n",
        b":ids 0 x\n\n",
        b':ids \ndata: {"id":"a","created":1,"choices":[{"index":-1}]}\n\n',
        b"event: ping\n\n",
        b"data: \xff\n\n",
    ],
)
def test_streams_without_token_ids_are_not_resumed(events_sent: bytes) -> None:
    transcript = Transcript(StreamShape(2, False))
    transcript.add(events_sent)
    assert not transcript.read()
    transcript.add(DONE)
    assert not transcript.read(), "not even by what follows"


def test_a_stream_is_not_resumed_within_the_echo_of_its_prompt() -> None:
    transcript = Transcript(StreamShape(2, False, has_echo=True))
    event = b'data: {"created":1,"choices":[{"index":%d,"token_ids":[%b]}]}\n\n'
    for index, ids, resumable in ((0, b"", False), (0, b"", False), (0, b"5", True), (1, b"", False)):
        transcript.add(event % (index, ids))
        assert transcript.read() is resumable
    transcript.add(b'data: {"created":1,"choices":[{"index":1,"token_ids":[],"finish_reason":"length"}]}\n\n')
    assert transcript.read()
    transcript.add(event % (0, b""))
    assert transcript.read(), "the echo is over"


def test_a_transcript_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_tokens, "MAX_RESUMED_TOKENS", 3)
    transcript = Transcript(StreamShape(1, False))
    for count, resumable in ((3, True), (1, False)):
        ids = ",".join("5" * count)
        transcript.add(b'data: {"created":1,"choices":[{"index":0,"token_ids":[%b]}]}\n\n' % ids.encode())
        assert transcript.read() is resumable


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"stream": True}, StreamShape(1, False)),
        ({"stream": True, "n": 2, "prompt": [[1], [2], [3]]}, StreamShape(6, False)),
        ({"stream": True, "stream_options": StreamOptions(include_usage=True)}, StreamShape(1, True)),
        ({"stream": True, "echo": True, "logprobs": 0}, StreamShape(1, False, has_echo=True)),
        ({"stream": True, "echo": True, "logprobs": 0, "n": 2}, None),
        ({"stream": True, "use_beam_search": True}, None),
        ({}, None),
    ],
)
def test_which_requests_are_resumed(fields: dict[str, Any], shape: StreamShape | None) -> None:
    assert resumable_shape(CompletionRequest(**{"prompt": "x", **fields})) == shape


async def test_resume_is_not_for_clients() -> None:
    async with rig([FakeEngine()]) as r:
        resume = {"created": 1, "choices": [{"token_ids": [5]}]}
        for stream in (False, True):
            response = await r.chat(stream=stream, resume=resume)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "resume"
        assert not r.engines[0].requests


async def test_only_our_streams_are_asked_for_ids() -> None:
    ours, foreign = FakeEngine(), FakeEngine(has_telemetry=False)
    async with rig([ours, foreign], policy="round-robin") as r:
        for stream in (False, True):
            for _ in range(2):
                await r.http.post("/v1/completions", json=completion(stream=stream), headers={RESUME: "1"})
        asked = {stream: RESUME in q.headers for q in ours.requests for stream in [q.json["stream"]]}
        assert asked == {False: False, True: True}
        assert not any(RESUME in request.headers for request in foreign.requests)


# who goes on


async def test_a_stream_moves_on_as_often_as_it_makes_progress() -> None:
    path, body = CALLS[1]
    size = sum(map(len, events(received(path, body))))
    script = ResumableStream()
    async with rig([FakeEngine(script=script), FakeEngine(script=script)], admin_port=0) as r:
        whole = fold(await ask(r, path, body))
        script.deaths = [size // 3, size // 3, size // 4]
        assert fold(await ask(r, path, body)) == whole
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') == 3
        records = (await r.http.get(r.router.admin_url + "/decisions", params={"limit": 4})).json()
        assert [record["attempt"] for record in records] == [4, 3, 2, 1]
        resumed = [record["resumed_tokens"] for record in records]
        assert resumed == sorted(resumed, reverse=True)
        assert resumed[-1] == 0 < resumed[-2]
        await r.until(lambda: is_settled(r))


async def test_a_request_that_kills_engines_is_given_up() -> None:
    path, body = CALLS[0]
    size = len(events(received(path, body))[0])
    script = ResumableStream(deaths=[size] + [0] * 20)
    async with rig([FakeEngine(script=script) for _ in range(8)]) as r:
        content = await ask(r, path, body)
        assert content.endswith(b"\n\n")
        assert b'"upstream_error"' in content.split(b"\n\n")[-2]
        assert sum(len(engine.requests) for engine in r.engines) == 5
        assert r.metric('migrations_total{model="tiny",outcome="failed"}') == 1
        await r.until(lambda: is_settled(r))


@pytest.mark.parametrize("second", [{"hello": {"model_fingerprint": "other"}}, {"has_telemetry": False}])
async def test_only_a_replica_of_the_same_model_continues_a_stream(second: dict[str, Any]) -> None:
    path, body = CALLS[0]
    first = len(events(received(path, body))[0])
    engines = [
        FakeEngine(script=ResumableStream(deaths=[first] * 9)),
        FakeEngine(script=ResumableStream(), **second),
    ]
    async with rig(engines, policy="round-robin") as r:
        contents = [await ask(r, path, body) for _ in range(2)]
        assert sum(b"upstream_error" in content for content in contents) == 1
        assert len(engines[1].requests) == 1


async def test_a_replica_that_refuses_to_resume_is_skipped() -> None:
    path, body = CALLS[0]
    first = len(events(received(path, body))[0])
    script = ResumableStream()

    async def busy(connection: Connection, request: Received) -> None:
        if "resume" in request.json:
            connection.answer(503, b'{"error":{"message":"busy"}}')
        else:
            await script(connection, request)

    engines = [
        FakeEngine(script=ResumableStream(deaths=[first])),
        FakeEngine(script=busy),
        FakeEngine(script=script),
    ]
    async with rig(engines, policy="round-robin") as r:
        whole = fold(await ask(r, path, chat(stream=True)))
        assert fold(await ask(r, path, body)) == whole
        assert r.metric("interrupted_streams_total") == 0


async def test_the_limit_of_requests_does_not_stop_a_stream_that_was_admitted() -> None:
    path, body = CALLS[0]
    first = len(events(received(path, body))[0])
    release = asyncio.Event()
    resumable = ResumableStream(deaths=[first])

    async def script(connection: Connection, request: Received) -> None:
        if request.json.get("stream"):
            await resumable(connection, request)
        else:
            await release.wait()
            connection.answer(200, b"{}")

    engines = [FakeEngine(script=script), FakeEngine(script=script)]
    async with rig(engines, fields={"limits": ServiceLimits(max_inflight_per_replica=1)}) as r:
        holding = asyncio.create_task(r.chat())
        await r.until(lambda: any(engine.requests for engine in engines))
        assert b"[DONE]" in await ask(r, path, body)
        release.set()
        await holding


# how replicas leave


@pytest.mark.parametrize(
    ("error", "is_resumed"), [(Unavailable("going down"), True), (InternalError("a bug"), False)]
)
async def test_an_engine_that_goes_down_hands_its_streams_over(error: Any, is_resumed: bool) -> None:
    path, body = CALLS[1]
    first = len(events(received(path, body))[0])
    last_words = b"data: " + error.body() + b"\n\n" + DONE
    script = ResumableStream()
    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        whole = fold(await ask(r, path, body))
        script.deaths, script.last_words = [first], last_words
        content = await ask(r, path, body)
        if is_resumed:
            assert fold(content) == whole
        else:
            assert content.endswith(last_words), "an engine's other words are the client's"
        assert all(not replica.health.is_ejected for replica in r.router.fleet.replicas())


async def test_a_stream_that_ends_too_early_is_migrated() -> None:
    path, body = CALLS[1]
    first = len(events(received(path, body))[0])
    script = ResumableStream()
    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        whole = fold(await ask(r, path, body))
        script.deaths, script.last_words = [first], b": bye\n\n"
        content = await ask(r, path, body)
        assert fold(content.replace(b": bye\n\n", b"")) == whole


async def test_a_stream_that_stalls_is_migrated() -> None:
    path, body = CALLS[0]
    stream = events(received(path, body))

    async def stall(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(b"".join(stream[:2]) + stream[2][:9])
        await connection.gone()

    engines = [FakeEngine(script=stall), FakeEngine(script=ResumableStream())]
    async with rig(engines, policy="round-robin", clock=StoppedClock()) as r:
        asked = asyncio.create_task(ask(r, path, body))
        await r.until_answering(0)
        await r.pass_time(UpstreamLimits().idle_timeout_s)
        assert fold(await asked) == fold(await ask(r, path, body))
        assert len(engines[0].requests) == 1


async def test_a_client_that_leaves_aborts_the_resumed_request() -> None:
    path, body = CALLS[0]
    first = len(events(received(path, body))[0])
    gone, asked = asyncio.Event(), asyncio.Event()
    resumable = ResumableStream(deaths=[first])

    async def script(connection: Connection, request: Received) -> None:
        if "resume" not in request.json:
            await resumable(connection, request)
            return
        asked.set()
        await connection.gone()
        gone.set()

    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        async with r.http.stream("POST", path, json=body, headers={"x-request-id": "same"}) as response:
            assert response.status_code == 200
            await asyncio.wait_for(asked.wait(), DEADLINE_S)
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        await r.until(lambda: is_settled(r))
