"""The gRPC port on which gateways ask for endpoints by Envoy's external processing protocol (ext_proc), and gRPC's
health checks. gRPC is imported only by a router with --ext-proc-port.

Owns: the limits of the port (messages, streams, what is received without a key, dead peers) and its certificate; one
stream of a gateway, with the deadlines between its messages and the end of the request when it ends; the protocol's
messages.
Must not know: how a replica is chosen, what a request costs.
Invariants: nothing that a peer sends ends the router; a stream that breaks the protocol ends with a status of gRPC's.
The request is closed on every way out, so that nothing it holds outlives the stream.

    request_headers -> request_body ... -> (pick or refusal) -> response_headers -> response_body ... -> end

In full-duplex streaming the router replies to the request's headers once the whole body has come, because the prompt
decides. With a buffered body it replies to the headers at once, and decides with the body.

The names of headers and metadata are those of the endpoint picker protocol of the Gateway API Inference Extension
(docs/proposals/004-endpoint-picker-protocol in its repository). Numbers and types of messages are those of
envoy/service/ext_proc/v3/external_processor.proto, of the messages that it refers to, and of
grpc/health/v1/health.proto (`tests/router/ext_proc_wire.json` has those of the published definitions). Fields that are
not listed are skipped when a message is read. Two simplifications do not show on the wire: an enumeration is an int32,
and a map is its entries. The package with Envoy's own messages on PyPI (xds-protos) also brings modules of google.api
and opentelemetry.proto, which overwrite those of other packages. Hence this table.
"""

# Not compiled: waits for gateways; protobuf's messages and gRPC take most of the time.

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

from argosy_protocol.errors import NotSupported, RequestTimeout
from argosy_protocol.program.listen import CannotListen
from argosy_router.config import RouterConfig
from argosy_router.gateway import EndpointPick, GatewayRequest, Intake, RouterAnswer
from argosy_router.http.limits import AddressGroups
from argosy_router.http.messages import Headers, first_value
from argosy_router.http.upstream import UpstreamError

PROCESS: Final = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")
"""Service and method."""
HEALTH_CHECK: Final = ("grpc.health.v1.Health", "Check")

_PACKAGE: Final = "argosy.ext_proc"
_STRUCT: Final = ".google.protobuf.Struct"
_Proto = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Proto.TYPE_BOOL,
    "bytes": _Proto.TYPE_BYTES,
    "int32": _Proto.TYPE_INT32,
    "string": _Proto.TYPE_STRING,
}


class Field(NamedTuple):
    """One field of a message."""

    number: int
    name: str
    type: str
    """A scalar type, or a message's name."""
    oneof: str = ""
    is_repeated: bool = False


SCHEMA: Final[dict[str, tuple[Field, ...]]] = {
    # from the gateway
    "ProcessingRequest": (
        Field(2, "request_headers", "HttpHeaders", "request"),
        Field(3, "response_headers", "HttpHeaders", "request"),
        Field(4, "request_body", "HttpBody", "request"),
        Field(5, "response_body", "HttpBody", "request"),
        Field(6, "request_trailers", "HttpTrailers", "request"),
        Field(7, "response_trailers", "HttpTrailers", "request"),
        Field(8, "metadata_context", "Metadata"),
        Field(10, "observability_mode", "bool"),
        Field(11, "protocol_config", "ProtocolConfiguration"),
    ),
    "ProtocolConfiguration": (
        Field(1, "request_body_mode", "int32"),
        Field(2, "response_body_mode", "int32"),
    ),
    "Metadata": (Field(1, "filter_metadata", "FilterMetadataEntry", is_repeated=True),),
    "FilterMetadataEntry": (Field(1, "key", "string"), Field(2, "value", _STRUCT)),
    "HttpHeaders": (Field(1, "headers", "HeaderMap"), Field(3, "end_of_stream", "bool")),
    "HttpBody": (Field(1, "body", "bytes"), Field(2, "end_of_stream", "bool")),
    "HttpTrailers": (Field(1, "trailers", "HeaderMap"),),
    "HeaderMap": (Field(1, "headers", "HeaderValue", is_repeated=True),),
    "HeaderValue": (Field(1, "key", "string"), Field(2, "value", "string"), Field(3, "raw_value", "bytes")),
    # to the gateway
    "ProcessingResponse": (
        Field(1, "request_headers", "HeadersResponse", "response"),
        Field(2, "response_headers", "HeadersResponse", "response"),
        Field(3, "request_body", "BodyResponse", "response"),
        Field(4, "response_body", "BodyResponse", "response"),
        Field(5, "request_trailers", "TrailersResponse", "response"),
        Field(6, "response_trailers", "TrailersResponse", "response"),
        Field(7, "immediate_response", "ImmediateResponse", "response"),
        Field(8, "dynamic_metadata", _STRUCT),
    ),
    "HeadersResponse": (Field(1, "response", "CommonResponse"),),
    "BodyResponse": (Field(1, "response", "CommonResponse"),),
    "TrailersResponse": (Field(1, "header_mutation", "HeaderMutation"),),
    "CommonResponse": (
        Field(2, "header_mutation", "HeaderMutation"),
        Field(3, "body_mutation", "BodyMutation"),
        Field(5, "clear_route_cache", "bool"),
    ),
    "ImmediateResponse": (
        Field(1, "status", "HttpStatus"),
        Field(2, "headers", "HeaderMutation"),
        Field(3, "body", "bytes"),
        Field(5, "details", "string"),
    ),
    "HttpStatus": (Field(1, "code", "int32"),),
    "HeaderMutation": (
        Field(1, "set_headers", "HeaderValueOption", is_repeated=True),
        Field(2, "remove_headers", "string", is_repeated=True),
    ),
    "HeaderValueOption": (Field(1, "header", "HeaderValue"), Field(3, "append_action", "int32")),
    "BodyMutation": (
        Field(1, "body", "bytes", "mutation"),
        Field(2, "clear_body", "bool", "mutation"),
        Field(3, "streamed_response", "StreamedBodyResponse", "mutation"),
    ),
    "StreamedBodyResponse": (Field(1, "body", "bytes"), Field(2, "end_of_stream", "bool")),
    # health checks
    "HealthCheckRequest": (Field(1, "service", "string"),),
    "HealthCheckResponse": (Field(1, "status", "int32"),),
}

NONE: Final = 0
STREAMED: Final = 1
BUFFERED: Final = 2
BUFFERED_PARTIAL: Final = 3
FULL_DUPLEX_STREAMED: Final = 4
"""Values of `BodySendMode`."""
APPEND_IF_EXISTS_OR_ADD: Final = 0
OVERWRITE_IF_EXISTS_OR_ADD: Final = 2
"""Values of `HeaderAppendAction`."""
SERVING: Final = 1
NOT_SERVING: Final = 2
"""Values of `ServingStatus`."""


def _file() -> Any:
    """Describe the schema to protobuf."""
    file = descriptor_pb2.FileDescriptorProto(
        name="argosy/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for oneof in dict.fromkeys(field.oneof for field in fields if field.oneof):
            message.oneof_decl.add(name=oneof)
        oneofs = [each.name for each in message.oneof_decl]
        for field in fields:
            label = _Proto.LABEL_REPEATED if field.is_repeated else _Proto.LABEL_OPTIONAL
            entry = message.field.add(name=field.name, number=field.number, label=label)
            if field.type in _SCALARS:
                entry.type = _SCALARS[field.type]
            else:
                entry.type = _Proto.TYPE_MESSAGE
                is_ours = not field.type.startswith(".")
                entry.type_name = f".{_PACKAGE}.{field.type}" if is_ours else field.type
            if field.oneof:
                entry.oneof_index = oneofs.index(field.oneof)
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
_pool.AddSerializedFile(_file().SerializeToString())


def message_class(name: str) -> Any:
    """Return the class of the messages of this name in `SCHEMA`."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest: Final = message_class("ProcessingRequest")
ProcessingResponse: Final = message_class("ProcessingResponse")
HttpHeaders: Final = message_class("HttpHeaders")
HttpBody: Final = message_class("HttpBody")
HttpTrailers: Final = message_class("HttpTrailers")
HeadersResponse: Final = message_class("HeadersResponse")
BodyResponse: Final = message_class("BodyResponse")
TrailersResponse: Final = message_class("TrailersResponse")
CommonResponse: Final = message_class("CommonResponse")
BodyMutation: Final = message_class("BodyMutation")
StreamedBodyResponse: Final = message_class("StreamedBodyResponse")
HealthCheckRequest: Final = message_class("HealthCheckRequest")
HealthCheckResponse: Final = message_class("HealthCheckResponse")


DESTINATION: Final = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE: Final = "envoy.lb"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
MAX_SUBSET: Final = 10_000
"""Endpoints of a subset that are read."""
MAX_BESIDE_BODY_BYTES: Final = 512 * 1024
"""Of a message: its headers and metadata, such as `MAX_SUBSET` endpoints. Two bytes may be a header, which takes a
hundred once it is read."""
MAX_HEADERS: Final = 1024
"""Headers of a message; the limit of a request's is lower."""
MAX_PIECE_BYTES: Final = 60_000
"""Size of the pieces in which a body is returned: Envoy's own pieces have 64 KiB at most."""

_KEPT: Final = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"te", b"trailer", b"via")
)
_KEPT_PREFIXES: Final = (b":", b"x-forwarded-", b"x-envoy-")
"""Headers of a request that the gateway has made or needs."""


_BODIES: Final = (4, 5)
"""Numbers of the fields `request_body` and `response_body`, whose first field is the body itself."""
_MAX_FIELDS: Final = 64
"""Fields in which a body is looked for."""


class MessageTooLarge(Exception):
    """A message has more beside its body than a gateway sends: whoever reaches the port may send it, without a key."""


# what is read


def parse(data: bytes) -> Any:
    """Parse a message of a gateway's.

    Raises:
        MessageTooLarge: before any of it is parsed.
    """
    if len(data) > MAX_BESIDE_BODY_BYTES and len(data) - _body_bytes(data) > MAX_BESIDE_BODY_BYTES:
        raise MessageTooLarge(f"a message has more than {MAX_BESIDE_BODY_BYTES} bytes beside its body")
    return ProcessingRequest.FromString(data)


def _body_bytes(data: bytes) -> int:
    """Return the length of the longest body in a message."""
    bodies = [(start, end) for number, start, end in _fields(data, 0, len(data)) if number in _BODIES]
    return max(
        (end - start for body in bodies for number, start, end in _fields(data, *body) if number == 1),
        default=0,
    )


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of the first fields of a message that have a length, and where these begin and end."""
    for _ in range(_MAX_FIELDS):
        key, start = _varint(data, start, end)
        if key & 7 == 0:
            _, start = _varint(data, start, end)
        elif key & 7 == 2:
            length, start = _varint(data, start, end)
            if start + length > end:
                return
            yield key >> 3, start, start + length
            start += length
        else:
            return
        if start >= end:
            return


def _varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = shift = 0
    while start < end and shift < 64:
        byte = data[start]
        start += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, start


def headers_of(headers: Any) -> Headers:
    """Return the headers of an `HttpHeaders`, with pseudo-headers.

    Raises:
        MessageTooLarge: there are too many.
    """
    if len(headers.headers.headers) > MAX_HEADERS:
        raise MessageTooLarge(f"a message has more than {MAX_HEADERS} headers")
    return [
        (header.key.encode("latin-1", "replace").lower(), header.raw_value or header.value.encode())
        for header in headers.headers.headers
    ]


def modes_of(message: Any) -> tuple[int, int]:
    """Return the modes in which bodies of request and response are sent, by the stream's first message. A gateway that
    does not say is one for the Inference Extension, which asks for full-duplex streaming."""
    if not message.HasField("protocol_config"):
        return FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED
    modes = message.protocol_config
    return modes.request_body_mode, modes.response_body_mode


def subset_of(message: Any) -> frozenset[str] | None:
    """Return the endpoints that the gateway allows; None for all."""
    entries = message.metadata_context.filter_metadata
    hints = [each.value.fields for each in entries if each.key == SUBSET_NAMESPACE]
    if not hints or SUBSET not in hints[-1]:
        return None
    value = hints[-1][SUBSET]
    given = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return frozenset(endpoint.strip() for endpoint in given[:MAX_SUBSET])


# replies


def continue_with_body() -> Any:
    """Reply to request headers: send the body."""
    return ProcessingResponse(request_headers=HeadersResponse())


def destination_headers(endpoint: str, lines: bytes, received: Headers) -> Any:
    """Reply to the request's headers in full-duplex streaming: where the request goes, and with which headers.

    Args:
        lines: header lines that the replica must get.
        received: the client's headers; those that are not in `lines` are removed, except for the gateway's own.
    """
    reply = ProcessingResponse(request_headers=HeadersResponse())
    _set_destination(reply, reply.request_headers.response, endpoint, lines, received)
    return reply


def destination_body(endpoint: str, lines: bytes, received: Headers, body: bytes) -> Any:
    """Reply to a buffered body; arguments as for `destination_headers`."""
    reply = ProcessingResponse(request_body=BodyResponse())
    _set_destination(reply, reply.request_body.response, endpoint, lines, received)
    reply.request_body.response.body_mutation.body = body
    return reply


def request_pieces(body: bytes, *, ends: bool) -> Iterator[Any]:
    """Yield the replies that return a request's body in full-duplex streaming; `ends`: no trailers follow."""
    for start in range(0, max(1, len(body)), MAX_PIECE_BYTES):
        end = start + MAX_PIECE_BYTES
        piece = StreamedBodyResponse(body=body[start:end], end_of_stream=ends and end >= len(body))
        yield ProcessingResponse(request_body=_streamed(piece))


def response_headers(lines: bytes) -> Any:
    """Reply to the response's headers; `lines` are set."""
    reply = ProcessingResponse(response_headers=HeadersResponse())
    _set(reply.response_headers.response.header_mutation, lines)
    return reply


def response_piece(mode: int, received: bytes, sent: bytes, *, ends: bool) -> Any:
    """Reply to a piece of the response's body.

    Args:
        mode: how the gateway sends the response's body.
        sent: what the client gets instead of `received`.
    """
    if mode == FULL_DUPLEX_STREAMED:
        piece = StreamedBodyResponse(body=sent, end_of_stream=ends)
        return ProcessingResponse(response_body=_streamed(piece))
    reply = ProcessingResponse(response_body=BodyResponse())
    if sent != received:
        mutation = reply.response_body.response.body_mutation
        if sent:
            mutation.body = sent
        else:
            mutation.clear_body = True
    return reply


def request_trailers() -> Any:
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_trailers() -> Any:
    return ProcessingResponse(response_trailers=TrailersResponse())


def immediate(status: int, lines: bytes, body: bytes) -> Any:
    """Have the gateway answer the client with this response."""
    reply = ProcessingResponse()
    answer = reply.immediate_response
    answer.status.code = status
    answer.body = body
    answer.details = "argosy"
    _set(answer.headers, lines)
    return reply


def _streamed(piece: Any) -> Any:
    mutation = BodyMutation(streamed_response=piece)
    return BodyResponse(response=CommonResponse(body_mutation=mutation))


def _set_destination(reply: Any, response: Any, endpoint: str, lines: bytes, received: Headers) -> None:
    mutation = response.header_mutation
    names = _set(mutation, lines + b"%b: %b\r\n" % (DESTINATION.encode(), endpoint.encode()))
    forbidden = {
        name
        for name, _ in received
        if name not in names and name not in _KEPT and not name.startswith(_KEPT_PREFIXES)
    }
    mutation.remove_headers.extend(sorted(name.decode("latin-1") for name in forbidden))
    response.clear_route_cache = True
    reply.dynamic_metadata.update({DESTINATION_NAMESPACE: {DESTINATION: endpoint}})


def _set(mutation: Any, lines: bytes) -> set[bytes]:
    """Have headers set; return their names."""
    names: set[bytes] = set()
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b": ")
        if not colon:
            continue
        option = mutation.set_headers.add(append_action=OVERWRITE_IF_EXISTS_OR_ADD)
        if name in names:
            option.append_action = APPEND_IF_EXISTS_OR_ADD
        option.header.key = name.decode("latin-1")
        option.header.raw_value = value
        names.add(name)
    return names


log = logging.getLogger(__name__)


class Peer(Protocol):
    """The gateway's end of a stream (`grpc.aio.ServicerContext`)."""

    def peer(self) -> str: ...

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...


class ProtocolViolation(Exception):
    """The gateway sent a message that the protocol does not allow here."""


class TooManyUnread(Exception):
    """Other streams have not sent their first message, and those that may be received at once are all of them."""


class FirstMessages:
    """Bounds the first messages that are received at once, before a key was looked at.

    gRPC keeps a message until it is whole, and only one that is read has more of it taken than `UNREAD_BYTES`. A
    gateway's first message fits into these nearly always, so that a read of it ends at once. A peer's address has a
    quarter of the places, so that one that sends slowly holds up itself.
    """

    def __init__(self, memory: int, message_bytes: int, addresses: AddressGroups) -> None:
        """`memory`: bytes that all such messages may take together, if they allow four of `message_bytes`."""
        number = max(MIN_FIRST_MESSAGES, memory // message_bytes)
        self._all = asyncio.Semaphore(number)
        self._per_address = number // 4
        self._by_address: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._addresses = addresses

    @contextlib.asynccontextmanager
    async def place(self, peer: str, timeout_s: float) -> AsyncIterator[None]:
        """Have a place for the message of a peer, as gRPC writes its address.

        Raises:
            TooManyUnread: there was none in time.
        """
        host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
        group = self._addresses.of(host)
        same = (
            self._by_address.setdefault(group, asyncio.Semaphore(self._per_address)) if group else self._all
        )
        async with contextlib.AsyncExitStack() as places:
            try:
                async with asyncio.timeout(timeout_s):
                    for semaphore in dict.fromkeys((same, self._all)):
                        await places.enter_async_context(semaphore)
            except TimeoutError:
                raise TooManyUnread(
                    "too many streams have not sent their first message; retry later"
                ) from None
            yield


class ProcessingStream:
    """Handles one stream."""

    def __init__(self, intake: Intake, peer: Peer, firsts: FirstMessages, *, silence_s: float) -> None:
        """`silence_s`: longest time between two messages of the response."""
        self._intake = intake
        self._peer = peer
        self._firsts = firsts
        self._silence_s = silence_s

    async def run(self) -> None:
        """
        Raises:
            ProtocolViolation, MessageTooLarge, TooManyUnread: see there.
            TimeoutError: the gateway is silent.
        """
        limit_s = self._intake.limits.header_timeout_s
        async with (
            self._firsts.place(self._peer.peer(), limit_s),
            asyncio.timeout(min(FIRST_MESSAGE_S, limit_s)),
        ):
            first = await self._peer.read()
        if first is grpc.aio.EOF or first.observability_mode:
            return  # who only watches gets no replies, and asks for no pick
        if first.WhichOneof("request") != "request_headers":
            raise ProtocolViolation("a stream begins with the headers of a request")
        request_mode, response_mode = modes_of(first)
        received = headers_of(first.request_headers)
        request = GatewayRequest(self._intake, received, subset_of(first))
        try:
            request.open()
            if request_mode not in (FULL_DUPLEX_STREAMED, BUFFERED):
                request.refuse(
                    NotSupported("the gateway must send bodies as FULL_DUPLEX_STREAMED or BUFFERED")
                )
            is_buffered = request_mode == BUFFERED
            is_whole = first.request_headers.end_of_stream
            if is_buffered and not is_whole and not request.decided.done():
                await self._peer.write(continue_with_body())
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
                await self._peer.write(immediate(*verdict))
                return
            lines, body = verdict.forwarded()
            if is_buffered:
                reply = destination_body(verdict.endpoint, lines, received, body)
                await self._peer.write(reply)
            else:
                await self._peer.write(destination_headers(verdict.endpoint, lines, received))
                for piece in request_pieces(body, ends=not has_trailers):
                    await self._peer.write(piece)
                if has_trailers:
                    await self._peer.write(request_trailers())
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
                headers = headers_of(message.response_headers)
                status = first_value(headers, b":status") or b""
                if not (status.isdigit() and len(status) == 3):
                    raise ProtocolViolation("a response without a status")
                pick.on_response(int(status), headers)
                is_whole = message.response_headers.end_of_stream
                if is_whole:
                    pick.on_end()
                await self._peer.write(response_headers(pick.response_lines))
            elif kind == "response_body" and has_begun:
                data = message.response_body.body
                is_whole = message.response_body.end_of_stream
                try:
                    sent = pick.on_data(data)
                except UpstreamError as error:
                    raise ProtocolViolation(str(error)) from None
                if is_whole:
                    sent += pick.on_end()
                await self._peer.write(response_piece(mode, data, sent, ends=is_whole))
            elif kind == "response_trailers" and has_begun:
                is_whole = True
                rest = pick.on_end()
                if rest and mode == FULL_DUPLEX_STREAMED:
                    await self._peer.write(response_piece(mode, b"", rest, ends=False))
                await self._peer.write(response_trailers())
            else:
                raise ProtocolViolation(f"{kind} where a response was expected")


_READINESS: Final = frozenset(("", "readiness", PROCESS[0]))
"""Services that the endpoint picker protocol names for health checks; `liveness` is another one."""
_MESSAGE_OVERHEAD: Final = 1 << 20
"""What a message may have beside a whole body: headers, metadata, attributes."""
UNREAD_BYTES: Final = 16 * 1024
"""Of a message that nobody reads yet. gRPC's own, which follows how fast a peer can send, is megabytes."""
MAX_STREAMS_PER_CONNECTION: Final = 1000
"""A gateway with more requests opens another connection."""
MIN_FIRST_MESSAGES: Final = 4
"""First messages that are received at once in any case."""
FIRST_MESSAGE_S = 2.0
"""In which a gateway sends a message that it has: Envoy waits for the reply for a fifth of a second, if not configured
otherwise."""
MAX_CONNECTIONS = 1024
"""Of gateways (one for each thread of an Envoy), which carry many streams each. Whoever reaches the port may open some,
and descriptors are those of the main port as well."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""From accepting a connection until it speaks HTTP/2; gRPC's own is two minutes."""
_KEEPALIVE_MS: Final = 30_000
"""Interval of the pings by which a dead gateway is noticed."""
_KEEPALIVE_TIMEOUT_MS: Final = 20_000


class ExtProcServer:
    """Serves gateways until it is stopped."""

    def __init__(self, config: RouterConfig, intake: Intake) -> None:
        self._config = config
        limits = config.server
        message_bytes = limits.max_body_bytes + _MESSAGE_OVERHEAD
        trusted = [ip_network(network) for network in limits.trusted_proxies]
        self._firsts = FirstMessages(limits.max_inflight_bytes, message_bytes, AddressGroups(trusted))
        options = [
            ("grpc.max_receive_message_length", message_bytes),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
            ("grpc.max_metadata_size", limits.max_header_bytes),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, limits.max_connections)),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.max_connections)
        self.intake = intake
        """What takes the requests."""
        self._server.add_generic_rpc_handlers(
            (
                _handler(
                    PROCESS,
                    grpc.stream_stream_rpc_method_handler(
                        self._process,
                        request_deserializer=parse,
                        response_serializer=ProcessingResponse.SerializeToString,
                    ),
                ),
                _handler(
                    HEALTH_CHECK,
                    grpc.unary_unary_rpc_method_handler(
                        self._check,
                        request_deserializer=HealthCheckRequest.FromString,
                        response_serializer=HealthCheckResponse.SerializeToString,
                    ),
                ),
            )
        )
        self.port = 0
        """The port in use, once started."""

    async def start(self) -> None:
        """
        Raises:
            CannotListen: the address is in use or does not belong to this machine.
        """
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.ext_proc_port}"
        try:
            if config.ssl_certfile is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(config))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address} (--ext-proc-port): {error}") from None
        await self._server.start()
        log.info("endpoint picker on %s:%d", config.host, self.port)

    async def stop(self) -> None:
        """Close the port and cut the streams."""
        await self._server.stop(None)

    async def _process(self, _: Any, context: Any) -> None:
        silence_s = self._config.request_timeout_s
        stream = ProcessingStream(self.intake, context, self._firsts, silence_s=silence_s)
        try:
            await stream.run()
        except (ProtocolViolation, MessageTooLarge) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TooManyUnread as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the gateway was silent for too long")

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service == "liveness":
            is_serving = True
        elif request.service in _READINESS:
            is_serving = self.intake.application.is_ready
        else:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        status = SERVING if is_serving else NOT_SERVING
        return HealthCheckResponse(status=status)


def _handler(name: tuple[str, str], handler: Any) -> Any:
    service, method = name
    return grpc.method_handlers_generic_handler(service, {method: handler})


def _credentials(config: RouterConfig) -> Any:
    """The OpenAI endpoint's certificate; its files are read again at a handshake if they have changed."""
    certfile, keyfile = config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile
    assert certfile is not None
    assert keyfile is not None
    files = [path for path in (certfile, keyfile, config.ssl_ca_certs) if path is not None]
    stamp = _stamp(files)

    def load() -> Any:
        authorities = None if config.ssl_ca_certs is None else config.ssl_ca_certs.read_bytes()
        pair = (keyfile.read_bytes(), certfile.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def reload() -> Any:
        nonlocal stamp
        try:
            latest = _stamp(files)
            if latest == stamp:
                return None
            stamp, fresh = latest, load()
        except OSError as error:
            log.warning("the gateway port keeps its certificate: %s", error)
            return None
        return fresh

    return grpc.dynamic_ssl_server_credentials(load(), reload, config.ssl_ca_certs is not None)


def _stamp(files: list[Path]) -> list[tuple[int, int]]:
    return [(status.st_mtime_ns, status.st_size) for status in (path.stat() for path in files)]
