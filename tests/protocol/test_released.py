"""Messages between programs of this release and of the one before (released/), in both directions."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonschema
import msgspec
import pytest

from argosy_protocol.telemetry import FrameReader, encode_frame
from released_formats import breaking_changes, lost_fields, released

from .released import record

RECORDED = released("messages.json")
STREAM = released("telemetry.json")
EXAMPLES = {"smallest": record.smallest, "filled": record.filled}


def test_released_messages_are_read_with_all_that_they_say() -> None:
    problems = {}
    for name, recorded in RECORDED["messages"].items():
        for size in EXAMPLES:
            read = msgspec.json.decode(json.dumps(recorded[size]), type=record.message_type(name))
            problems[name, size] = list(lost_fields(recorded[size], record.plain(read)))
    assert {case: lost for case, lost in problems.items() if lost} == {}


def test_messages_of_today_are_valid_for_the_released_reader() -> None:
    problems = {}
    for name, recorded in RECORDED["messages"].items():
        for size, example in EXAMPLES.items():
            written = record.plain(example(record.message_type(name)))
            errors = jsonschema.Draft202012Validator(recorded["schema"]).iter_errors(written)
            problems[name, size] = [f"{error.json_path}: {error.message}" for error in errors]
    assert {case: errors for case, errors in problems.items() if errors} == {}


def test_messages_change_only_by_fields_that_have_defaults() -> None:
    changes = {
        name: breaking_changes(recorded["schema"], record.schema(name))
        for name, recorded in RECORDED["messages"].items()
    }
    assert {name: lines for name, lines in changes.items() if lines} == {}


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_released_telemetry_stream_is_read(size: int) -> None:
    data = b"".join(bytes.fromhex(frame["bytes"]) for frame in STREAM)
    reader = FrameReader()
    read = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
    assert (len(read), reader.skipped) == (len(STREAM), 0)
    lost = [
        list(lost_fields(frame["fields"], record.plain(now))) for frame, now in zip(STREAM, read, strict=True)
    ]
    assert [lines for lines in lost if lines] == []


def test_telemetry_of_today_is_valid_for_the_released_reader() -> None:
    """Each frame is a little-endian length and a msgpack map. A reader skips a frame whose type it does not know."""
    schemas = {name.lower(): recorded["schema"] for name, recorded in RECORDED["messages"].items()}
    problems = []
    for frame in record.frames():
        data = encode_frame(frame)
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        fields = as_json(msgspec.msgpack.decode(data[4:]))
        errors = jsonschema.Draft202012Validator(schemas[fields["type"]]).iter_errors(fields)
        problems += [f"{fields['type']}: {error.json_path}: {error.message}" for error in errors]
    assert problems == []


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Values that msgpack has and JSON has not, as the schemas describe them."""
    return {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in fields.items()
    }


def test_names_on_the_wire_stay() -> None:
    recorded = RECORDED["constants"]
    lost = {module: list(lost_fields(names, record.constants(module))) for module, names in recorded.items()}
    assert {module: lines for module, lines in lost.items() if lines} == {}


def test_keys_and_chunk_hashes_stay() -> None:
    """A router finds no prefix in the cache of an engine that hashes otherwise, and gets no answer with other keys."""
    assert list(lost_fields(RECORDED["derived"], record.derived())) == []


OBJECT = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}, "required": ["a"]}
A = OBJECT["properties"]["a"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("new", "change"),
    [
        (OBJECT | {"properties": {"a": A, "b": {"type": "string", "default": ""}}}, []),
        (OBJECT | {"properties": {}}, [".a is gone"]),
        (OBJECT | {"required": []}, [".a is not always written any more"]),
        (OBJECT | {"required": ["a", "b"]}, [".b is required now"]),
        (OBJECT | {"properties": {"a": A | {"type": "string"}}}, [".a: type 'integer' became 'string'"]),
        (OBJECT | {"properties": {"a": A | {"maximum": 6}}}, [".a: maximum 5 became 6"]),
        (OBJECT | {"properties": {"a": A | {"enum": [1]}}}, [".a: enum None became [1]"]),
        (OBJECT | {"properties": {"a": A | {"default": 1}}}, [".a: default None became 1"]),
        (OBJECT | {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": A | {"minimum": 0}}},
         [".a: minimum None became 0"]),
        (OBJECT | {"properties": {"a": {"anyOf": [A]}}},
         [".a: type 'integer' became None", ".a: maximum 5 became None", ".a: 0 alternatives became 1"]),
        (OBJECT | {"items": {}}, [": items changed"]),
    ],
)  # fmt: skip
def test_the_check_sees_what_an_older_program_misreads(new: dict[str, Any], change: list[str]) -> None:
    assert breaking_changes(OBJECT, new) == change
