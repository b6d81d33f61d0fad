"""An Envoy by script: it asks the router by the external processing protocol, and carries requests to engines itself.

It applies what the router says as Envoy does: the header mutation, then the body that comes back, and it sends the
request to the endpoint named in the header. It checks the protocol's order, so that a reply out of turn fails a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx

from argosy_router import ext_proc

from .harness import Rig

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)
DESTINATION = "x-gateway-destination-endpoint"


@dataclass
class Answer:
    """What Envoy's client gets."""

    status: int
    headers: dict[str, str]
    body: bytes
    endpoint: str = ""
    """Where the request went; empty if the router answered."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Stream:
    """One request of Envoy's client, message by message."""

    call: Any
    headers: dict[str, str]
    request_mode: int = FULL_DUPLEX
    response_mode: int = FULL_DUPLEX
    has_config: bool = True
    subset: Sequence[str] | None = None
    is_first: bool = True
    destination: str = ""
    forwarded: bytes = b""
    reply_headers: dict[str, str] = field(default_factory=dict)

    async def send(self, **message: Any) -> None:
        request = ext_proc.ProcessingRequest(**message)
        if self.is_first:
            self.is_first = False
            if self.has_config:
                request.protocol_config.request_body_mode = self.request_mode
                request.protocol_config.response_body_mode = self.response_mode
            if self.subset is not None:
                hint = request.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
                hint.value.update({"x-gateway-destination-endpoint-subset": list(self.subset)})
        await self.call.write(request)

    async def receive(self, kind: str) -> Any:
        """Read the next reply, which must be of this kind or an immediate response."""
        reply = await self.call.read()
        assert reply is not grpc.aio.EOF, f"the router closed the stream instead of a {kind}"
        got = reply.WhichOneof("response")
        assert got in (kind, "immediate_response"), f"{got} instead of {kind}"
        return reply

    async def send_headers(self, *, ends: bool = False) -> None:
        await self.send(request_headers=http_headers(self.headers, ends=ends))

    async def send_body(self, data: bytes, *, ends: bool = True) -> None:
        await self.send(request_body=ext_proc.HttpBody(body=data, end_of_stream=ends))

    async def ask(self, pieces: Sequence[bytes]) -> Answer | None:
        """Send the request; return the router's own answer, or None if it named an endpoint."""
        await self.send_headers(ends=not pieces)
        if self.request_mode == BUFFERED and pieces:
            reply = await self.receive("request_headers")
            if reply.HasField("immediate_response"):
                return immediate(reply)
            pieces = [b"".join(pieces)]
        reply = asyncio.ensure_future(self.destination_reply())
        await asyncio.sleep(0)  # it reads from now on
        # The router may refuse the head and end the stream while the body is sent.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for number, piece in enumerate(pieces, 1):
                await self.send_body(piece, ends=number == len(pieces))
        return await reply

    async def destination_reply(self) -> Answer | None:
        kind = "request_body" if self.request_mode == BUFFERED else "request_headers"
        reply = await self.receive(kind)
        if reply.HasField("immediate_response"):
            return immediate(reply)
        response = getattr(reply, kind).response
        self.apply(self.headers, response.header_mutation)
        self.destination = self.headers.pop(DESTINATION)
        assert reply.dynamic_metadata["envoy.lb"][DESTINATION] == self.destination
        if self.request_mode == BUFFERED:
            self.forwarded = response.body_mutation.body
            return None
        is_whole = False
        while not is_whole:
            reply = await self.receive("request_body")
            piece = reply.request_body.response.body_mutation.streamed_response
            assert len(piece.body) <= 64 * 1024
            self.forwarded += piece.body
            is_whole = piece.end_of_stream
        return None

    async def send_response(self, status: int, headers: dict[str, str], *, ends: bool = False) -> None:
        await self.send(response_headers=http_headers({":status": str(status), **headers}, ends=ends))
        reply = await self.receive("response_headers")
        self.reply_headers = dict(headers)
        self.apply(self.reply_headers, reply.response_headers.response.header_mutation)

    async def send_response_body(self, data: bytes, *, ends: bool = False) -> bytes:
        """Send a piece of the response; return what the client gets of it."""
        await self.send(response_body=ext_proc.HttpBody(body=data, end_of_stream=ends))
        mutation = (await self.receive("response_body")).response_body.response.body_mutation
        kind = mutation.WhichOneof("mutation")
        if self.response_mode == FULL_DUPLEX:
            assert kind == "streamed_response"
            assert mutation.streamed_response.end_of_stream == ends
            return mutation.streamed_response.body
        return {None: data, "clear_body": b"", "body": mutation.body}[kind]

    @staticmethod
    def apply(headers: dict[str, str], mutation: Any) -> None:
        for name in mutation.remove_headers:
            headers.pop(name, None)
        for option in mutation.set_headers:
            headers[option.header.key] = option.header.raw_value.decode()


class ScriptedEnvoy:
    """Envoy in front of a router's endpoint picker."""

    def __init__(self, process: Any, http: httpx.AsyncClient) -> None:
        self._process = process
        self._http = http

    def open(self, path: str = "/v1/chat/completions", method: str = "POST", **given: Any) -> Stream:
        """Begin a request of Envoy's client."""
        headers = {
            ":method": method,
            ":path": path,
            ":authority": "gateway",
            "content-type": "application/json",
            "accept-encoding": "gzip",
            "x-envoy-expected-rq-timeout-ms": "15000",
            **given.pop("headers", {}),
        }
        return Stream(self._process(), headers, **given)

    async def request(self, body: Any, pieces: int = 1, **given: Any) -> Answer:
        """Carry a whole request and its whole answer; the body is sent in `pieces`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = max(1, -(-len(data) // pieces))
        stream = self.open(**given)
        own = await stream.ask([data[start : start + size] for start in range(0, len(data), size)])
        return own if own is not None else await self.carry(stream)

    async def carry(self, stream: Stream) -> Answer:
        """Send a request to the endpoint that the router named, and show the router the response."""
        headers = {name: value for name, value in stream.headers.items() if not name.startswith(":")}
        assert int(headers["content-length"]) == len(stream.forwarded)
        url = f"http://{stream.destination}{stream.headers[':path']}"
        body = b""
        try:
            async with self._http.stream("POST", url, headers=headers, content=stream.forwarded) as response:
                given = {
                    name: value for name, value in response.headers.items() if name != "transfer-encoding"
                }
                given["x-envoy-upstream-service-time"] = "1"
                await stream.send_response(response.status_code, given)
                async for piece in response.aiter_raw():
                    body += await stream.send_response_body(piece)
                body += await stream.send_response_body(b"", ends=True)
                status = response.status_code
        except httpx.ConnectError:
            status = 503
            await stream.send_response(status, {"content-type": "text/plain"})
            body = await stream.send_response_body(b"upstream connect error", ends=True)
        assert await stream.call.read() is grpc.aio.EOF
        return Answer(status, stream.reply_headers, body, stream.destination)


def http_headers(headers: dict[str, str], *, ends: bool = False) -> Any:
    message = ext_proc.HttpHeaders(end_of_stream=ends)
    for name, value in headers.items():
        message.headers.headers.add(key=name, raw_value=value.encode())
    return message


def immediate(reply: Any) -> Answer:
    answer = reply.immediate_response
    headers: dict[str, str] = {}
    Stream.apply(headers, answer.headers)
    return Answer(answer.status.code, headers, answer.body)


@contextlib.asynccontextmanager
async def envoy(r: Rig) -> AsyncIterator[ScriptedEnvoy]:
    """An Envoy that asks this rig's router, which was started with `ext_proc_port=0`."""
    assert r.router.gateway is not None
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{r.router.gateway.port}") as channel,
        httpx.AsyncClient(trust_env=False, headers={}) as http,
    ):
        process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )
        yield ScriptedEnvoy(process, http)
