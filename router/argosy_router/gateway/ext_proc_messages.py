"""Messages of Envoy's external processing protocol: what is read of requests, and how replies are made.

The names of headers and metadata are those of the endpoint picker protocol of the Gateway API Inference Extension
(docs/proposals/004-endpoint-picker-protocol in its repository).

Must not know: streams, requests, replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from argosy_router.gateway import ext_proc_schema as ext_proc
from argosy_router.http.messages import Headers

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
    return ext_proc.ProcessingRequest.FromString(data)


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
        return ext_proc.FULL_DUPLEX_STREAMED, ext_proc.FULL_DUPLEX_STREAMED
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
    return ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())


def destination_headers(endpoint: str, lines: bytes, received: Headers) -> Any:
    """Reply to the request's headers in full-duplex streaming: where the request goes, and with which headers.

    Args:
        lines: header lines that the replica must get.
        received: the client's headers; those that are not in `lines` are removed, except for the gateway's own.
    """
    reply = ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())
    _set_destination(reply, reply.request_headers.response, endpoint, lines, received)
    return reply


def destination_body(endpoint: str, lines: bytes, received: Headers, body: bytes) -> Any:
    """Reply to a buffered body; arguments as for `destination_headers`."""
    reply = ext_proc.ProcessingResponse(request_body=ext_proc.BodyResponse())
    _set_destination(reply, reply.request_body.response, endpoint, lines, received)
    reply.request_body.response.body_mutation.body = body
    return reply


def request_pieces(body: bytes, *, ends: bool) -> Iterator[Any]:
    """Yield the replies that return a request's body in full-duplex streaming; `ends`: no trailers follow."""
    for start in range(0, max(1, len(body)), MAX_PIECE_BYTES):
        end = start + MAX_PIECE_BYTES
        piece = ext_proc.StreamedBodyResponse(body=body[start:end], end_of_stream=ends and end >= len(body))
        yield ext_proc.ProcessingResponse(request_body=_streamed(piece))


def response_headers(lines: bytes) -> Any:
    """Reply to the response's headers; `lines` are set."""
    reply = ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse())
    _set(reply.response_headers.response.header_mutation, lines)
    return reply


def response_piece(mode: int, received: bytes, sent: bytes, *, ends: bool) -> Any:
    """Reply to a piece of the response's body.

    Args:
        mode: how the gateway sends the response's body.
        sent: what the client gets instead of `received`.
    """
    if mode == ext_proc.FULL_DUPLEX_STREAMED:
        piece = ext_proc.StreamedBodyResponse(body=sent, end_of_stream=ends)
        return ext_proc.ProcessingResponse(response_body=_streamed(piece))
    reply = ext_proc.ProcessingResponse(response_body=ext_proc.BodyResponse())
    if sent != received:
        mutation = reply.response_body.response.body_mutation
        if sent:
            mutation.body = sent
        else:
            mutation.clear_body = True
    return reply


def request_trailers() -> Any:
    return ext_proc.ProcessingResponse(request_trailers=ext_proc.TrailersResponse())


def response_trailers() -> Any:
    return ext_proc.ProcessingResponse(response_trailers=ext_proc.TrailersResponse())


def immediate(status: int, lines: bytes, body: bytes) -> Any:
    """Have the gateway answer the client with this response."""
    reply = ext_proc.ProcessingResponse()
    answer = reply.immediate_response
    answer.status.code = status
    answer.body = body
    answer.details = "argosy"
    _set(answer.headers, lines)
    return reply


def _streamed(piece: Any) -> Any:
    mutation = ext_proc.BodyMutation(streamed_response=piece)
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


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
        option = mutation.set_headers.add(append_action=ext_proc.OVERWRITE_IF_EXISTS_OR_ADD)
        if name in names:
            option.append_action = ext_proc.APPEND_IF_EXISTS_OR_ADD
        option.header.key = name.decode("latin-1")
        option.header.raw_value = value
        names.add(name)
    return names
