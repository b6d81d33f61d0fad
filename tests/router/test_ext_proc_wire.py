"""The router's schema of the external processing protocol, against the published definitions.

`ext_proc_wire.json` has the fields of the published messages, and messages that the published classes encoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy_router import ext_proc

WIRE = json.loads(Path(__file__).with_name("ext_proc_wire.json").read_text())


def encoded(name: str) -> bytes:
    return bytes.fromhex(WIRE["encoded"][name])


@pytest.mark.parametrize("name", ext_proc.SCHEMA)
def test_fields_are_the_published_ones(name: str) -> None:
    published = WIRE["messages"][name]
    for field in ext_proc.SCHEMA[name]:
        number, kind, oneof, is_repeated = published[field.name]
        ours = field.type if field.type in ("bool", "bytes", "int32", "string") else "message"
        assert (field.number, ours, field.oneof, field.is_repeated) == (number, kind, oneof, is_repeated)


def test_values_of_enumerations_are_the_published_ones() -> None:
    for names, values in (
        (("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED"), "BodySendMode"),
        (("APPEND_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS_OR_ADD"), "HeaderAppendAction"),
        (("SERVING", "NOT_SERVING"), "ServingStatus"),
    ):
        for name in names:
            assert getattr(ext_proc, name) == WIRE["enums"][values][name]


def test_a_published_request_is_read() -> None:
    request = ext_proc.ProcessingRequest.FromString(encoded("request"))
    assert request.WhichOneof("request") == "request_headers"
    assert ext_proc.headers_of(request.request_headers) == [(b":path", b"/v1/chat/completions")]
    assert request.request_headers.end_of_stream
    assert ext_proc.subset_of(request) == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert ext_proc.modes_of(request) == (ext_proc.FULL_DUPLEX_STREAMED, ext_proc.STREAMED)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "destination",
            ext_proc.destination_headers(
                "10.0.0.1:8000", b"content-length: 2\r\n", [(b":path", b"/"), (b"authorization", b"Bearer x")]
            ),
        ),
        ("refusal", ext_proc.immediate(429, b"retry-after: 1\r\n", b"{}")),
        ("piece", ext_proc.response_piece(ext_proc.FULL_DUPLEX_STREAMED, b"", b"data", ends=True)),
    ],
)
def test_replies_are_encoded_as_the_published_classes_do(name: str, message: Any) -> None:
    assert message.SerializeToString(deterministic=True) == encoded(name)
