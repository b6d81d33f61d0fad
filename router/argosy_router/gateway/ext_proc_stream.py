"""One stream of a gateway, which is one HTTP request: the order of its messages, and the router's replies.

Owns: the deadlines between messages, and the end of the request when the stream ends.
Must not know: how a replica is chosen, what a request costs.
Invariant: the request is closed on every way out, so that nothing it holds outlives the stream.

    request_headers -> request_body ... -> (pick or refusal) -> response_headers -> response_body ... -> end

In full-duplex streaming the router replies to the request's headers once the whole body has come, because the prompt
decides. With a buffered body it replies to the headers at once, and decides with the body.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import grpc.aio

from argosy_protocol.errors import NotSupported, RequestTimeout
from argosy_router.gateway import ext_proc_messages as messages
from argosy_router.gateway import ext_proc_schema as schema
from argosy_router.gateway.endpoint_pick import EndpointPick
from argosy_router.gateway.request_intake import GatewayRequest, Intake, RouterAnswer
from argosy_router.http.messages import first_value
from argosy_router.http.upstream_errors import UpstreamError

log = logging.getLogger(__name__)


class Peer(Protocol):
    """The gateway's end of a stream (`grpc.aio.ServicerContext`)."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...


class ProtocolViolation(Exception):
    """The gateway sent a message that the protocol does not allow here."""


class ProcessingStream:
    """Handles one stream."""

    def __init__(self, intake: Intake, peer: Peer, *, silence_s: float) -> None:
        """`silence_s`: longest time between two messages of the response."""
        self._intake = intake
        self._peer = peer
        self._silence_s = silence_s

    async def run(self) -> None:
        """
        Raises:
            ProtocolViolation: see there.
        """
        async with asyncio.timeout(self._intake.limits.header_timeout_s):
            first = await self._peer.read()
        if first is grpc.aio.EOF or first.observability_mode:
            return  # who only watches gets no replies, and asks for no pick
        if first.WhichOneof("request") != "request_headers":
            raise ProtocolViolation("a stream begins with the headers of a request")
        request_mode, response_mode = messages.modes_of(first)
        received = messages.headers_of(first.request_headers)
        request = GatewayRequest(self._intake, received, messages.subset_of(first))
        try:
            request.open()
            if request_mode not in (schema.FULL_DUPLEX_STREAMED, schema.BUFFERED):
                request.refuse(
                    NotSupported("the gateway must send bodies as FULL_DUPLEX_STREAMED or BUFFERED")
                )
            is_buffered = request_mode == schema.BUFFERED
            is_whole = first.request_headers.end_of_stream
            if is_buffered and not is_whole and not request.decided.done():
                await self._peer.write(messages.continue_with_body())
            has_trailers = False
            while not is_whole and not request.decided.done():
                message = await self._next_of_body(request)
                if message is None:
                    continue
                if message is grpc.aio.EOF:
                    return
                kind = message.WhichOneof("request")
                if kind == "request_body":
                    request.feed(message.request_body.body)
                    is_whole = message.request_body.end_of_stream
                elif kind == "request_trailers":
                    is_whole = has_trailers = True
                else:
                    raise ProtocolViolation(f"{kind} within a request")
            if not request.decided.done():
                request.complete()
            verdict = await request.decided
            if isinstance(verdict, RouterAnswer):
                await self._peer.write(messages.immediate(*verdict))
                return
            lines, body = verdict.forwarded()
            if is_buffered:
                reply = messages.destination_body(verdict.endpoint, lines, received, body)
                await self._peer.write(reply)
            else:
                await self._peer.write(messages.destination_headers(verdict.endpoint, lines, received))
                for piece in messages.request_pieces(body, ends=not has_trailers):
                    await self._peer.write(piece)
                if has_trailers:
                    await self._peer.write(messages.request_trailers())
            request.forwarded()
            await self._follow(verdict, response_mode)
        finally:
            request.close()

    async def _next_of_body(self, request: GatewayRequest) -> Any:
        """Read the next message; None if it did not come in time, and the request was refused."""
        try:
            async with asyncio.timeout(max(0.0, request.time_left_s)):
                return await self._peer.read()
        except TimeoutError:
            request.refuse(RequestTimeout("the request body was not received in time"))
            return None

    async def _follow(self, pick: EndpointPick, mode: int) -> None:
        """Follow the response to its end, or to the end of the stream."""
        is_whole = has_begun = False
        while not is_whole:
            async with asyncio.timeout(self._silence_s):
                message = await self._peer.read()
            if message is grpc.aio.EOF:
                return
            kind = message.WhichOneof("request")
            if kind == "response_headers" and not has_begun:
                has_begun = True
                headers = messages.headers_of(message.response_headers)
                status = first_value(headers, b":status") or b""
                if not (status.isdigit() and len(status) == 3):
                    raise ProtocolViolation("a response without a status")
                pick.on_response(int(status), headers)
                is_whole = message.response_headers.end_of_stream
                if is_whole:
                    pick.on_end()
                await self._peer.write(messages.response_headers(pick.response_lines))
            elif kind == "response_body" and has_begun:
                data = message.response_body.body
                is_whole = message.response_body.end_of_stream
                try:
                    sent = pick.on_data(data)
                except UpstreamError as error:
                    raise ProtocolViolation(str(error)) from None
                if is_whole:
                    sent += pick.on_end()
                await self._peer.write(messages.response_piece(mode, data, sent, ends=is_whole))
            elif kind == "response_trailers" and has_begun:
                is_whole = True
                rest = pick.on_end()
                if rest and mode == schema.FULL_DUPLEX_STREAMED:
                    await self._peer.write(messages.response_piece(mode, b"", rest, ends=False))
                await self._peer.write(messages.response_trailers())
            else:
                raise ProtocolViolation(f"{kind} where a response was expected")
