"""Streams of Anthropic's API that move to another replica, and those that cannot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from argosy_protocol.anthropic import MESSAGE_STOP, error_event
from argosy_protocol.errors import ApiError, InternalError, Unavailable
from argosy_protocol.headers import IN_COMMENTS, RESUME
from argosy_router.proxy.answer_tokens import PARSED_TOGETHER_BYTES, MessageTranscript
from argosy_router.proxy.decoded_types import StreamShape
from message_events import message, parsed

from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import Rig, is_settled, rig

BODY = {
    "model": MODEL,
    "max_tokens": 99,
    "stream": True,
    "messages": [{"role": "user", "content": "hi"}],
}
SHAPE = StreamShape(1, False, is_message=True)
USAGE = {"input_tokens": 7, "output_tokens": 7, "cache_read_input_tokens": 0}
START = {"id": "msg_1", "model": MODEL, "content": [], "stop_reason": None, "usage": USAGE}


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def begin(index: int, kind: str, **fields: Any) -> bytes:
    return event("content_block_start", index=index, content_block={"type": kind, **fields})


def delta(index: int, kind: str, name: str, text: str) -> bytes:
    return event("content_block_delta", index=index, delta={"type": kind, name: text})


def stop(index: int) -> bytes:
    return event("content_block_stop", index=index)


OUTPUTS = [
    (
        [
            event("message_start", message=START),
            begin(0, "thinking", thinking="", signature=""),
            event("ping"),
            delta(0, "thinking_delta", "thinking", "event: error\ndata: "),
        ],
        [10],
    ),
    ([delta(0, "thinking_delta", "thinking", "so")], [11, 12]),
    ([], [13]),
    (
        [
            delta(0, "signature_delta", "signature", "s"),
            stop(0),
            begin(1, "text", text=""),
            delta(1, "text_delta", "text", "I"),
        ],
        [14],
    ),
    ([delta(1, "text_delta", "text", " call")], [15]),
    (
        [
            stop(1),
            begin(2, "tool_use", id="c", name="f", input={}),
            delta(2, "input_json_delta", "partial_json", "{}"),
            stop(2),
        ],
        [16],
    ),
    (
        [
            event("message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage=USAGE),
            MESSAGE_STOP,
        ],
        [17],
    ),
]
"""The events of each output, and its token ids."""


def lines(told: list[bytes], ids: list[int]) -> list[bytes]:
    """The events of one output as an engine sends them to a router."""
    comment = b":ids 0 %b\n" % b",".join(b"%d" % token_id for token_id in ids)
    if not told:
        return [comment + b"\n"]
    return [*(b":ids 0 \n" + part for part in told[:-1]), comment + told[-1]]


SENT = [lines(*output) for output in OUTPUTS]
PARTS = [part for output in SENT for part in output]
WHOLE = message(parsed(b"".join(PARTS)))
ENDS = [sum(map(len, SENT[: number + 1])) for number in range(len(SENT))]
"""Number of parts after each output."""
STATES = [(1, "thinking"), (1, "thinking"), (1, "thinking"), (2, "text"), (2, "text"), (3, None), (3, None)]
"""After each output: how many blocks have begun, and the type of the open one."""
IDS = [[token_id for _, ids in OUTPUTS[: number + 1] for token_id in ids] for number in range(len(OUTPUTS))]


@dataclass
class ResumableMessage:
    """Sends the message, from where `resume` says; dies after `deaths[0]` parts."""

    deaths: list[int] = field(default_factory=list)
    last_words: bytes = b""

    async def __call__(self, connection: Connection, request: Received) -> None:
        assert request.headers[RESUME] == IN_COMMENTS
        resume, sent = request.json.get("resume"), 0
        if resume is not None:
            number = IDS.index(resume["token_ids"])
            assert (resume["num_blocks"], resume.get("open_block")) == STATES[number]
            sent = ENDS[number]
        connection.begin_stream()
        if not self.deaths:
            connection.chunk(b"".join(PARTS[sent:]))
            connection.end_stream()
            return
        count = self.deaths.pop(0)
        if count:
            connection.chunk(b"".join(PARTS[sent : sent + count]))
        if self.last_words:
            connection.chunk(self.last_words)
            connection.end_stream()
            return
        await connection.writer.drain()
        connection.writer.close()


async def ask(r: Rig) -> bytes:
    return (await r.http.post("/v1/messages", json=BODY)).content


async def test_a_stream_moves_at_every_place_where_a_token_is_whole() -> None:
    """Elsewhere it ends with an error in Anthropic's shape. Nobody sees token ids."""
    script = ResumableMessage()
    async with rig([FakeEngine(script=script), FakeEngine(script=script)], policy="round-robin") as r:
        for count in range(len(PARTS) + 1):
            script.deaths = [count]
            content = await ask(r)
            assert b":ids" not in content
            if count in (0, *ENDS) or count >= len(PARTS) - 1:
                assert message(parsed(content)) == WHOLE, count
            else:
                assert not script.deaths
                last = parsed(content)[-1]
                assert (last["type"], last["error"]["type"]) == ("error", "api_error"), count
        await r.until(lambda: is_settled(r))
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') == len(ENDS) - 1
        assert r.metric('migrations_total{model="tiny",outcome="completed"}') == 2


async def test_without_another_replica_the_stream_ends_with_an_error_event() -> None:
    script = ResumableMessage(deaths=[ENDS[1]])
    async with rig([FakeEngine(script=script)]) as r:
        *_, last = parsed(await ask(r))
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize(
    ("error", "is_resumed"), [(Unavailable("going down"), True), (InternalError("a bug"), False)]
)
async def test_an_engine_that_goes_down_hands_its_streams_over(error: ApiError, is_resumed: bool) -> None:
    script = ResumableMessage(deaths=[ENDS[3]], last_words=error_event(error))
    async with rig([FakeEngine(script=script), FakeEngine(script=script)]) as r:
        content = await ask(r)
        if is_resumed:
            assert message(parsed(content)) == WHOLE
        else:
            assert content.endswith(error_event(error)), "an engine's other words are the client's"
            assert sum(len(engine.requests) for engine in r.engines) == 1
        assert all(not replica.health.is_ejected for replica in r.router.fleet.replicas())


def test_a_transcript_does_not_depend_on_how_events_came() -> None:
    once, split = MessageTranscript(SHAPE), MessageTranscript(SHAPE)
    for number, sent in enumerate(SENT[:-1]):
        once = MessageTranscript(SHAPE)
        once.add(b"".join(part for output in SENT[: number + 1] for part in output))
        for part in sent:
            split.add(part)
            split.read()
        assert once.read()
        assert split.read()
        assert once.continuing(b"{}") == split.continuing(b"{}")
        assert once.num_tokens == split.num_tokens == len(IDS[number])
        assert once.missing_end is None
    split.add(SENT[-1][0])
    assert split.read()
    assert split.missing_end == MESSAGE_STOP
    split.add(SENT[-1][1])
    assert split.read()
    assert split.missing_end == b""


@pytest.mark.parametrize(
    "strange",
    [
        event("ping"),
        b":ids 0 5\n" + event("unheard_of"),
        b":ids 0 5\nevent: content_block_start\ndata: {}\n\n",
        b":ids 0 5\n" + begin(0, "image"),
        b":ids 1 5\n" + event("ping"),
        b":ids 0 x\n" + event("ping"),
    ],
)
def test_a_stream_that_is_not_understood_is_not_continued(strange: bytes) -> None:
    transcript = MessageTranscript(SHAPE)
    transcript.add(strange)
    transcript.add(SENT[1][0])
    assert not transcript.read()
    assert transcript.tokens(bytes_per_token=1000.0) == 2, "each event counts as one at least"


def test_a_long_stream_is_read_in_time() -> None:
    transcript = MessageTranscript(SHAPE)
    part = lines([delta(0, "text_delta", "text", "x" * 1000)], [5])[0]
    for _ in range(100):
        transcript.add(part)
    assert transcript.num_tokens > 100 - PARSED_TOGETHER_BYTES // len(part) - 2
