"""The part of Envoy's external processing protocol, and of gRPC's health checks, that the router reads and writes.

Numbers and types are those of envoy/service/ext_proc/v3/external_processor.proto, of the messages that it refers to,
and of grpc/health/v1/health.proto (`tests/router/ext_proc_wire.json` has those of the published definitions). Fields
that are not listed are skipped when a message is read. Two simplifications do not show on the wire: an enumeration is
an int32, and a map is its entries.

The package with Envoy's own messages on PyPI (xds-protos) also brings modules of google.api and opentelemetry.proto,
which overwrite those of other packages. Hence this table.

Must not know: what the messages mean.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

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
    "HeaderValue": (
        Field(1, "key", "string"),
        Field(2, "value", "string"),
        Field(3, "raw_value", "bytes"),
    ),
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
