"""What a stream that is cut has used: it is charged by what was generated, as far as that can be known."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest

from argosy_protocol.headers import RESUME
from argosy_router.config import UpstreamLimits
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.proxy.answer_tokens import SCAN_BYTES, StreamTally, without_progress
from argosy_router.proxy.relay import StreamRelay

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import Rig, StoppedClock, chat, rig
from .scripted_envoy import envoy

COMPLETION = 'usage_tokens_total{key="",kind="completion",model="tiny"}'
IDLE = UpstreamLimits(idle_timeout_s=5.0)
STEP_S = 0.02
"""What the router assumes of a replica that has reported none."""


def told(text: str, tokens: int, choice: int = 0) -> bytes:
    """An event as vLLM sends it with `continuous_usage_stats`: what it reports is the usage of its choice."""
    usage = {"prompt_tokens": 40, "total_tokens": 40 + tokens, "completion_tokens": tokens}
    chunk = {**json.loads(event(text).removeprefix(b"data: ")), "usage": usage}
    chunk["choices"][0]["index"] = choice
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def with_ids(text: str, *token_ids: int) -> bytes:
    return b":ids 0 %b\n" % ",".join(map(str, token_ids)).encode() + event(text)


class Script:
    """Sends these events, and then nothing, or dies when told to."""

    def __init__(self, *events: bytes) -> None:
        self.events = events
        self.dies = asyncio.Event()

    async def __call__(self, connection: Connection, _: Received) -> None:
        connection.begin_stream()
        for each in self.events:
            connection.chunk(each)
        dying = asyncio.create_task(self.dies.wait())
        leaving = asyncio.create_task(connection.gone())
        await asyncio.wait((dying, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if dying.done():
            connection.die()
        dying.cancel()


async def leave(r: Rig, body: dict[str, Any], end: bytes, after_s: float = 0.0, path: str = "") -> bytes:
    """Ask for a stream, and leave so long after this end of what was sent; return what that was."""
    seen = b""
    async with r.http.stream("POST", path or "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for piece in answer.aiter_raw():
            seen += piece
            if seen.endswith(end):
                break
        if after_s:
            await r.pass_time(after_s)
    await r.until(lambda: r.router.requests.inflight == 0)
    return seen


def near(tokens: int) -> Any:
    """The stopped clock moves on by two ticks more than it is told to."""
    return pytest.approx(tokens, abs=2)


# engines of other makes


async def test_events_of_many_tokens_count_by_their_text() -> None:
    texts = [f"{number:4}" * 900 for number in range(10)]
    engine = FakeEngine(script=Script(*map(event, texts)), has_telemetry=False)
    async with rig([engine], clock=StoppedClock()) as r:
        await leave(r, chat(stream=True, stream_interval=900), event(texts[-1]))
        assert r.metric(COMPLETION) == 9000
        assert r.metric('usage_requests_total{key="",metered="estimated",model="tiny"}') == 1


async def test_engines_are_asked_for_usage_in_every_event_which_their_clients_do_not_see() -> None:
    script = Script(told("", 0), told("hel", 4000), told("lo", 9000))
    async with rig([FakeEngine(script=script, has_telemetry=False)], clock=StoppedClock()) as r:
        seen = await leave(r, chat(stream=True, max_tokens=9000), event("lo"))
        assert seen == event("") + event("hel") + event("lo")
        asked = r.engines[0].requests[-1].json["stream_options"]
        assert asked == {"include_usage": True, "continuous_usage_stats": True}
        assert r.metric(COMPLETION) == 9000
        assert r.metric('usage_tokens_total{key="",kind="prompt",model="tiny"}') == 40
        assert r.metric('usage_requests_total{key="",metered="yes",model="tiny"}') == 1


async def test_a_client_that_asked_for_it_sees_usage_in_every_event() -> None:
    script = Script(told("hel", 1), told("lo", 2))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with rig([FakeEngine(script=script, has_telemetry=False)], clock=StoppedClock()) as r:
        seen = await leave(r, chat(stream=True, stream_options=options), told("lo", 2))
        assert seen == told("hel", 1) + told("lo", 2)


async def test_each_choice_counts_by_what_its_own_events_report() -> None:
    script = Script(told("a", 500, 0), told("b", 700, 1), told("c", 600, 0))
    async with rig([FakeEngine(script=script, has_telemetry=False)], clock=StoppedClock()) as r:
        await leave(r, chat(stream=True, n=2, max_tokens=700), event("c"))
        assert r.metric(COMPLETION) == 600 + 700


async def test_what_a_replica_can_have_generated_without_an_event_counts() -> None:
    """Reasoning that the client does not want to see, or a large `stream_interval`."""
    for limit, tokens in ((10_000, near(250)), (100, 100)):
        engine = FakeEngine(script=Script(told("", 0)), has_telemetry=False)
        async with rig([engine], clock=StoppedClock()) as r:
            body = chat(stream=True, include_reasoning=False, max_tokens=limit)
            await leave(r, body, event(""), after_s=250 * STEP_S)
            assert r.metric(COMPLETION) == tokens
            assert r.metric('usage_requests_total{key="",metered="estimated",model="tiny"}') == 1


async def test_a_replica_that_dies_has_generated_until_then() -> None:
    script = Script(told("a", 1))
    async with rig([FakeEngine(script=script, has_telemetry=False)], clock=StoppedClock()) as r:
        asking = asyncio.create_task(r.chat(stream=True, max_tokens=10_000))
        await r.until_answering(0)
        await r.pass_time(250 * STEP_S)
        script.dies.set()
        await asking
        assert r.metric(COMPLETION) == near(251)


async def test_a_replica_that_was_silent_for_too_long_may_have_stopped_long_before() -> None:
    engine = FakeEngine(script=Script(told("a", 1)), has_telemetry=False)
    async with rig([engine], clock=StoppedClock(), upstream=IDLE) as r:
        asking = asyncio.create_task(r.chat(stream=True, max_tokens=10_000))
        await r.until_answering(0)
        await r.pass_time(3 * IDLE.idle_timeout_s)
        await asking
        assert r.metric(COMPLETION) == 1


# engines of ours


async def test_token_ids_count_and_what_may_be_kept_back() -> None:
    """Without `stream_interval` an engine of ours tells each token."""
    for asked, tokens in (({}, 3), ({"stream_interval": 100}, 3 + 99)):
        engine = FakeEngine(script=Script(with_ids("abc", 5, 6, 7)))
        async with rig([engine], clock=StoppedClock()) as r:
            await leave(r, chat(stream=True, **asked), event("abc"), after_s=500 * STEP_S)
            assert RESUME in r.engines[0].requests[-1].headers
            assert "continuous_usage_stats" not in r.engines[0].requests[-1].json["stream_options"]
            assert r.metric(COMPLETION) == tokens


async def test_a_stream_whose_ids_cannot_be_read_counts_by_its_text() -> None:
    texts = ["x" * 4000, "y" * 4000]
    async with rig([FakeEngine(script=Script(*map(event, texts)))], clock=StoppedClock()) as r:
        await leave(r, chat(stream=True), event(texts[-1]))
        assert r.metric(COMPLETION) == 2000


# other endpoints


def typed(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


@pytest.mark.parametrize("has_telemetry", [False, True])
async def test_a_response_counts_by_its_deltas(has_telemetry: bool) -> None:
    """Its other events repeat their text."""
    texts = ["x" * 4000, "y" * 4000]
    last = typed("response.output_text.done", text="".join(texts))
    events = [typed("response.output_text.delta", delta=text) for text in texts]
    engine = FakeEngine(script=Script(*events, last), has_telemetry=has_telemetry)
    async with rig([engine], clock=StoppedClock()) as r:
        body = {"model": "tiny", "input": "hi", "stream": True, "max_output_tokens": 2000}
        await leave(r, body, last, path="/v1/responses")
        assert r.metric(COMPLETION) == 2000


async def test_a_message_of_another_make_counts_by_its_deltas() -> None:
    started = typed("message_start", message={"usage": {"input_tokens": 4, "output_tokens": 1}})
    deltas = [
        typed("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "x" * 4000}),
        typed("content_block_delta", index=1, delta={"type": "text_delta", "text": "y" * 4000}),
    ]
    engine = FakeEngine(script=Script(started, *deltas), has_telemetry=False)
    async with rig([engine], clock=StoppedClock()) as r:
        body = {**chat(stream=True), "max_tokens": 2000}
        await leave(r, body, deltas[-1], path="/v1/messages")
        assert r.metric(COMPLETION) == 2000


# gateways


async def test_what_a_gateway_has_shown_of_a_stream_counts_when_its_client_leaves() -> None:
    texts = ["x" * 4000, "y" * 4000]
    async with (
        rig([FakeEngine(has_telemetry=False)], ext_proc_port=0, clock=StoppedClock()) as r,
        envoy(r) as gateway,
    ):
        stream = gateway.open()
        await stream.ask([json.dumps(chat(stream=True, max_tokens=2000)).encode()])
        forwarded = json.loads(stream.forwarded)
        assert forwarded["stream_options"] == {"include_usage": True}, "gateways need not show the answer"
        await stream.send_response(200, {"content-type": "text/event-stream"})
        for text in texts:
            assert await stream.send_response_body(event(text)) == event(text)
        stream.call.cancel()
        await r.until(lambda: r.router.requests.inflight == 0)
        assert r.metric(COMPLETION) == 2000


# the count


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_count_does_not_depend_on_how_events_come(size: int) -> None:
    quoted = 'he said "content": "' + "\\" * 3
    events = [event(quoted + "z" * 3000) for _ in range(40)]
    tally = StreamTally()
    for start in range(0, len(events), size):
        tally.add(b"".join(events[start : start + size]))
    assert sum(map(len, events)) > 3 * SCAN_BYTES
    assert tally.tokens(4.0) == pytest.approx(40 * (len(json.dumps(quoted)) + 3000) / 4, rel=0.01)


def test_text_after_the_last_report_counts_too() -> None:
    tally = StreamTally()
    tally.add(told("a" * 4000, 5) + told("b", 6) + event("c" * 400))
    assert tally.tokens(4.0) == 6 + 100


def test_an_escaped_character_counts_as_one() -> None:
    escaped, plain = StreamTally(), StreamTally()
    escaped.add(event("中" * 1000))
    plain.add(event("中" * 1000).replace(rb"\u4e2d", "中".encode()))
    assert escaped.tokens(3.0) == plain.tokens(3.0) == 1000


FINAL = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}\n\n'
DETAILED = b'"usage":{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":1},"completion_tokens":2}'


@pytest.mark.parametrize(
    ("events", "left"),
    [
        (told("a", 1) + told("b", 2) + FINAL + DONE, event("a") + event("b") + FINAL + DONE),
        (b'data: {"choices":[{}],' + DETAILED + b"}\n\n", b'data: {"choices":[{}]}\n\n'),
        (b"data: {" + DETAILED + b',"choices":[{}]}\r\n\r\n', b'data: {"usage":null,"choices":[{}]}\r\n\r\n'),
        (event('"usage": {"a": 1}'), event('"usage": {"a": 1}')),
        (
            b'data: {"choices":[{"top_logprobs":{"usage":-1}}],"usage":null}\n\n',
            b'data: {"choices":[{"top_logprobs":{"usage":-1}}],"usage":null}\n\n',
        ),
    ],
)
def test_usage_that_clients_did_not_ask_for_is_kept_back(events: bytes, left: bytes) -> None:
    assert without_progress(events) == left


def test_a_text_full_of_escapes_is_read_in_little_memory() -> None:
    """A megabyte of line breaks took forty of memory while it was searched, and as long as ten without escapes."""
    tally = StreamTally(is_response=True)
    tracemalloc.start()
    try:
        tally.add(b'data: {"delta":"' + rb"\n" * (1 << 19) + b'"}\n\n')
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tally.tokens(4.0) == 1 << 18
    assert peak < 8 << 20


@pytest.mark.parametrize("is_response", [False, True])
def test_a_long_text_counts_though_its_middle_is_not_read(is_response: bool) -> None:
    tally = StreamTally(is_response=is_response)
    field = b"delta" if is_response else b"content"
    tally.add(b'data: {"%b":"%b"}\n\n' % (field, b"a" * (4 << 20)))
    assert tally.tokens(4.0) == pytest.approx(1 << 20, rel=0.01)


def test_texts_of_a_long_event_stand_for_those_that_are_not_read() -> None:
    tally = StreamTally()
    tally.add(b'data: {"choices":[%b{}]}\n\n' % (b'{"content":"aaaaaaaa","logprobs":"bbbbbbbb"},' * 50_000))
    assert tally.tokens(4.0) == pytest.approx(100_000, rel=0.01)


def test_what_a_long_event_of_a_response_repeats_counts_once_and_is_not_kept() -> None:
    """It was scanned three times: one of 33 MB held the event loop for 100 ms, and stayed in memory uncounted."""
    text = b"a" * 2000
    repeated = b'"item":{"text":"%b","logprobs":[%b]}' % (text, b'{"token":"a"},' * 80_000)
    usage = b'"usage":{"input_tokens":7,"output_tokens":500,"total_tokens":507}'
    ends = ((b"output_item.done", repeated), (b"completed", repeated + b"," + usage))
    tracemalloc.start()
    try:
        relay = StreamRelay(None, BodyReservation(BodyMemory(1 << 30), "service", 0), is_response=True)
        for name, rest in ends:
            delta = b'event: response.output_text.delta\ndata: {"delta":"%b"}\n\n' % text
            assert relay.feed(delta)
            assert relay.usage is None
            assert relay.tokens(4.0) == 500 * (1 + (name == b"completed")), name
            assert relay.feed(b"event: response.%b\ndata: {%b}\n\n" % (name, rest))
        del rest
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert relay.usage is not None
    assert relay.usage.completion_tokens == 500
    assert kept < 1 << 20
