"""Keep-alive comments while a stream has no event, so that no load balancer closes it."""

from __future__ import annotations

import asyncio
import json

import pytest

from argosy_router.config import ConfigError, FlowControlLimits
from argosy_router.main import build_parser, config_of
from argosy_router.proxy.relay import MAX_BUFFERED_BYTES

from .fake_engine import DONE, Connection, FakeEngine, Received, answer_normally, event
from .harness import Rig, chat, rig

COMMENT = ": keep-alive"
NEVER_S = 3600.0


class Silent:
    """A script that sends nothing, or a stream's head alone, until the test gives it the rest."""

    def __init__(self, *, accepts: bool) -> None:
        self.accepts = accepts
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.fate = "answer"

    async def __call__(self, connection: Connection, request: Received) -> None:
        if self.accepts:
            connection.begin_stream()
            await connection.writer.drain()
        self.asked.set()
        await self.go_on.wait()
        if self.fate == "die":
            connection.die()
        elif self.accepts:
            connection.chunk(b": of the engine\n\n" + event("hello") + DONE)
            connection.end_stream()
        else:
            await answer_normally(connection, request)


def times(after_s: float, interval_s: float = 0.02) -> FlowControlLimits:
    return FlowControlLimits(keep_alive_s=interval_s, keep_alive_after_s=after_s)


class Listener:
    """A client that asks for a stream, and what it has heard of it."""

    def __init__(self, r: Rig, n: int = 1) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.task = asyncio.create_task(self._listen(r, n))

    async def _listen(self, r: Rig, n: int) -> None:
        body = chat(stream=True, n=n)
        async with r.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            self.status = answer.status_code
            async for line in answer.aiter_lines():
                self.lines.append(line)

    @property
    def comments(self) -> int:
        return self.lines.count(COMMENT)

    @property
    def data(self) -> list[str]:
        return [line.removeprefix("data: ") for line in self.lines if line and line != COMMENT]


@pytest.mark.parametrize(("accepts", "after_s"), [(True, NEVER_S), (False, 0.05)])
async def test_an_awaited_first_token_is_announced_by_comments(accepts: bool, after_s: float) -> None:
    script = Silent(accepts=accepts)
    async with rig([FakeEngine(script=script)], flow_control=times(after_s)) as r:
        client = Listener(r)
        await r.until(lambda: client.comments >= 3)
        assert client.status == 200
        assert not client.data
        script.go_on.set()
        await client.task
        assert client.data[-1] == "[DONE]"
        assert not any("of the engine" in line for line in client.lines)


async def test_comments_come_between_events_and_never_within_one() -> None:
    """An engine may send nothing but token ids for minutes, while it writes a tool call."""
    go_on = asyncio.Event()
    one, other = event("hel"), event("lo")

    async def pause_within_an_event(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(one + other[:20])
        await go_on.wait()
        connection.chunk(other[20:] + DONE)
        connection.end_stream()

    async with rig([FakeEngine(script=pause_within_an_event)], flow_control=times(NEVER_S)) as r:
        client = Listener(r)
        await r.until(lambda: bool(client.data))
        told = client.comments
        await r.until(lambda: client.comments > told + 2)
        go_on.set()
        await client.task
        texts = [json.loads(text)["choices"][0]["delta"]["content"] for text in client.data[:-1]]
        assert texts == ["hel", "lo"]
        assert client.data[-1] == "[DONE]"


async def test_a_long_answer_that_is_no_stream_gets_no_comments() -> None:
    """It is sent in pieces, and a comment would be a part of it."""
    go_on = asyncio.Event()
    body = json.dumps({"text": "x" * (MAX_BUFFERED_BYTES + 1)}).encode()

    async def pause_near_the_end(connection: Connection, request: Received) -> None:
        if request.json["n"] == 1:
            connection.begin_stream()
            connection.chunk(event("hello"))
            await connection.gone()
        else:
            connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            connection.send(b"content-length: %d\r\n\r\n%b" % (len(body), body[:-2]))
            await go_on.wait()
            connection.send(body[-2:])

    engine = FakeEngine(script=pause_near_the_end)
    async with rig([engine], flow_control=times(NEVER_S)) as r:
        long = Listener(r, n=2)
        await r.until(lambda: long.status == 200)
        beside = Listener(r, n=1)
        await r.until(lambda: beside.comments > 5)
        go_on.set()
        await long.task
        assert "".join(long.lines).encode() == body
        await engine.stop()
        await beside.task


async def test_no_comment_is_sent_before_a_replica_has_the_request() -> None:
    """A comment commits the status: what fails early keeps its own."""
    mute, accepting = Silent(accepts=False), Silent(accepts=True)
    mute.fate = "die"
    engines = [FakeEngine(script=script) for script in (mute, accepting)]
    async with rig(engines, flow_control=times(NEVER_S), policy="round-robin") as r:
        clients = [Listener(r), Listener(r)]
        await r.until(lambda: any(client.comments > 5 for client in clients))
        (unheard,) = (client for client in clients if not client.status)
        await mute.asked.wait()
        await engines[1].stop()
        mute.go_on.set()
        await unheard.task
        assert unheard.status in (502, 503)


async def test_a_request_that_is_accepted_late_gets_comments_from_then_on() -> None:
    late = asyncio.Event()
    asked = asyncio.Event()

    async def accept_late(connection: Connection, _: Received) -> None:
        asked.set()
        await late.wait()
        connection.begin_stream()
        await connection.gone()

    engines = [FakeEngine(script=accept_late), FakeEngine(script=Silent(accepts=True))]
    async with rig(engines, flow_control=times(NEVER_S), policy="round-robin") as r:
        clients = [Listener(r), Listener(r)]
        await asked.wait()
        await r.until(lambda: any(client.comments > 2 for client in clients))
        late.set()
        await r.until(lambda: all(client.comments > 2 for client in clients))
        for engine in engines:
            await engine.stop()
        for client in clients:
            await client.task


async def test_a_request_may_still_move_on_after_comments() -> None:
    script = Silent(accepts=True)
    script.fate = "die"
    engines = [FakeEngine(script=script), FakeEngine()]
    async with rig(engines, flow_control=times(NEVER_S), policy="round-robin") as r:
        clients = [Listener(r), Listener(r)]
        await script.asked.wait()
        await r.until(lambda: any(client.comments for client in clients))
        script.go_on.set()
        for client in clients:
            await client.task
            assert client.status == 200
            texts = [json.loads(text) for text in client.data[:-1]]
            assert "".join(text["choices"][0]["delta"]["content"] for text in texts) == "hello"
        assert r.metric('retries_total{model="tiny",reason="reset"}') == 1


async def test_a_failure_after_comments_is_an_event() -> None:
    script = Silent(accepts=True)
    script.fate = "die"
    async with rig([FakeEngine(script=script)], flow_control=times(NEVER_S)) as r:
        client = Listener(r)
        await r.until(lambda: client.comments > 0)
        script.go_on.set()
        await client.task
        assert client.status == 200
        (error,) = client.data
        assert json.loads(error)["error"]["type"]
        assert r.metric('requests_total{code="502",model="tiny"}') == 1


async def test_unary_answers_get_none() -> None:
    script = Silent(accepts=False)
    async with rig([FakeEngine(script=script)], flow_control=times(0.01)) as r:
        asked = asyncio.create_task(r.chat())
        await script.asked.wait()
        beside = Listener(r)
        await r.until(lambda: beside.comments > 5)
        script.go_on.set()
        assert (await asked).json()["object"] == "chat.completion"
        await beside.task


@pytest.mark.parametrize(
    "flags",
    [
        ["--idle-timeout", "0"],
        ["--idle-timeout", "1e9"],
        ["--keep-alive-after", "-1"],
        ["--request-timeout", "0"],
        ["--request-timeout", "nan"],
        ["--first-byte-timeout", "0"],
        ["--first-byte-timeout", "inf"],
        ["--shutdown-timeout", "-1"],
        ["--shutdown-timeout", "nan"],
        ["--drain-settle", "-1"],
        ["--drain-settle", "inf"],
    ],
)
def test_the_times_are_checked(flags: list[str]) -> None:
    arguments = build_parser().parse_args(["--replica", "http://127.0.0.1:1", *flags])
    with pytest.raises(ConfigError, match=flags[0]):
        config_of(arguments, {})


def test_the_times_can_be_set() -> None:
    flags = ["--replica", "http://127.0.0.1:1", "--idle-timeout", "120", "--keep-alive-after", "5"]
    config = config_of(build_parser().parse_args(flags), {})
    assert (config.upstream.idle_timeout_s, config.flow_control.keep_alive_after_s) == (120.0, 5.0)
