"""The router's framing against that of the server engines run on (uvicorn with httptools): what the router takes for a
request is one there, too, and what it forwards arrives as it is. No sockets: both protocols are driven directly."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState as EngineState

from argosy_router.http.messages import Request, status_line
from argosy_router.proxy.call import forwarded_headers

from .framing_corpus import REFUSED, SMUGGLED
from .framing_streams import streams
from .server_in_memory import Message, Recorder, Wire, ours

TURNS = 20
"""Of the loop, in which the server surely answers one request."""


class EngineWire(Wire):
    """A transport with the addresses that uvicorn asks for."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return self.is_closed


async def engine(data: bytes) -> list[Message]:
    """What an engine's server takes the stream for: the requests whose bodies it got whole."""
    messages: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, event = b"", {"more_body": True}
        while event.get("more_body"):
            event = await receive()
            if event["type"] != "http.request":
                return
            body += event.get("body", b"")
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        messages.append((scope["method"].encode(), target, body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = Config(app, http="httptools", lifespan="off", log_config=None, access_log=False)
    config.load()
    state = EngineState()
    protocol = HttpToolsProtocol(config, state, {}, asyncio.get_running_loop())
    wire = EngineWire()
    protocol.connection_made(wire)  # type: ignore[arg-type]
    protocol.data_received(data)
    seen = -1
    while seen < len(messages):  # one after another; what is not whole never comes
        seen = len(messages)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    await asyncio.gather(*state.tasks)
    return messages


class Forwarder(Recorder):
    """Keeps what a replica would be sent, and the next request right behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def on_request(self, connection: Any, request: Request) -> None:
        self.sent.append(
            b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\n%bcontent-length: %d\r\n\r\n%b"
            % (forwarded_headers(request.headers), len(request.body), request.body)
        )
        super().on_request(connection, request)


@settings(max_examples=150, deadline=None)
@given(streams())
def test_the_engine_reads_alike_what_the_router_accepts(data: bytes) -> None:
    accepted, _ = ours([data])
    theirs = asyncio.run(engine(data))
    both = min(len(accepted), len(theirs))  # after an error uvicorn drops what it has not begun to answer
    assert accepted[:both] == theirs[:both], "either may be stricter, neither of another opinion"


@settings(max_examples=100, deadline=None)
@given(streams())
def test_a_forwarded_request_is_one_request_with_the_same_body(data: bytes) -> None:
    forwarder = Forwarder()
    accepted, _ = ours([data], forwarder)
    theirs = asyncio.run(engine(b"".join(forwarder.sent)))
    assert theirs == [(b"POST", b"/v1/completions", body) for _, _, body in accepted]


def test_nothing_of_a_refused_stream_reaches_the_engine() -> None:
    passed = {}
    for name, data in REFUSED.items():
        forwarder = Forwarder()
        accepted, answers = ours([data], forwarder)
        if accepted or forwarder.sent or not answers.startswith(status_line(400)):
            passed[name] = (accepted, forwarder.sent, answers)
    assert passed == {}


def test_the_comparison_sees_a_smuggled_request() -> None:
    body = b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\n\r\n" + SMUGGLED
    assert len(asyncio.run(engine(body))) == 2, "the engine's side of the comparison counts what is smuggled"
