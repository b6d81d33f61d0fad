"""The bounds of a request's JSON."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_protocol import json_limits
from argosy_protocol.errors import BadRequest, PayloadTooLarge
from argosy_protocol.json_limits import MAX_VALUES, decode_body
from argosy_protocol.openai import decode_request
from argosy_protocol.pooling import decode_embedding_request

CODE = 'x = {"a\\\\": [1, 2], "b": {},}\n'


def test_text_full_of_separators_is_text() -> None:
    text = CODE * (2 * MAX_VALUES // len(CODE))
    request = decode_request(
        "chat/completions", json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    )
    assert request.messages[0].content == text  # type: ignore[union-attr]


def test_a_million_token_ids_are_a_prompt() -> None:
    body = b'{"prompt":[' + b"7," * (MAX_VALUES - 3) + b"7]}"
    assert len(decode_request("completions", body).prompt) == MAX_VALUES - 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (decode_embedding_request, b'{"input":[' + b"7," * 10_000_000 + b"7]}"),
        (lambda body: decode_request("completions", body), b'{"prompt":[' + b"7," * 10_000_000 + b"7]}"),
        (
            lambda body: decode_request("chat/completions", body),
            b'{"messages":[{"role":"user","content":"x"}],"tools":[{"x":[' + b"[]," * MAX_VALUES + b"1]}]}",
        ),
        (
            lambda body: decode_request("chat/completions", body),
            b'{"messages":[{"role":"user","content":"x"}],"tools":[{"x":[' + b'"",' * MAX_VALUES + b'""]}]}',
        ),
    ],
)
def test_more_values_are_refused_undecoded(decode: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(PayloadTooLarge, match="values"):
        decode(body)


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,[{é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='b"\\,', max_size=4), inner, max_size=4)
    ),
)


@pytest.mark.parametrize(
    "field",
    [
        b'"\xff":1',
        b'"a":{"\xed\xa0\x80":1}',
        b'"a":["\xe2\x82"]',
        b'"a":"%b\xc3"' % ("\u20ac" * 65_536).encode(),
    ],
)
def test_fields_that_are_not_utf8_are_refused_though_nothing_reads_them(field: bytes) -> None:
    with pytest.raises(BadRequest, match="must be UTF-8"):
        decode_request("completions", b'{"model":"tiny","prompt":"x",%b}' % field)


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u20ac", "\U0001f600"])
def test_every_text_may_be_in_a_field_that_nothing_reads(letter: str) -> None:
    field = {f"{offset * 'x'}{letter}": letter * 70_000 for offset in range(4)}
    value = msgspec.json.encode({"a": field})[1:]
    assert decode_request("completions", b'{"prompt":"x",%b' % value).prompt == "x"


def depth(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(depth, value if isinstance(value, list) else value.values()), default=0)


@given(VALUES, st.integers(0, 6))
def test_only_nested_values_are_too_deep_whatever_strings_contain(value: Any, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "MAX_DEPTH", limit)
        for indent in (None, 1):
            body = json.dumps(value, ensure_ascii=False, indent=indent).encode()
            assert json_limits.is_too_deep(body) == (depth(value) > limit)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"a": 1, "b": {"c": [[%s]]}}', "b"),
        (b'{"a]": "[[[", "x\\"y": %s}', 'x\\"y'),
        (b"[%s]", None),
        (b'{"a": [' + b"1," * 20_000 + b'2], "b": "' + b"[" * 500 + b'", "c": %s}', "c"),
        (b'{"a": [' + b"[]," * 20_000 + b'2], "c": %s}', None),
        (b'{"a": "' + b"x" * 900_000 + b'", "c": %s}', "c"),
        (b'{"a": "' + b"x" * 1_100_000 + b'", "c": %s}', None),
        (b'{"a": %s, "unterminated', "a"),
    ],
)
def test_the_field_that_is_too_deep_is_named(body: bytes, field: str | None) -> None:
    for deep in (b"[" * 200 + b"]" * 200, b'{"k":' * 200 + b"1" + b"}" * 200):
        with pytest.raises(BadRequest, match="nested too deeply") as caught:
            json_limits.decode_body(msgspec.json.Decoder(), body % deep)
        assert caught.value.param == field


@pytest.mark.parametrize("end", [b"", b"\\"], ids=["in a string", "in an escape"])
def test_a_string_without_an_end_is_read_once_when_the_deep_field_is_searched(end: bytes) -> None:
    """If its first quote began no string, each of the quotes in it would be tried, which takes a quadratic time, and
    then the brackets in it would count as those of its field."""
    body = b'{"a":' + b'\\"' * 2_000 + b"[" * 200 + end
    with pytest.raises(BadRequest, match="nested too deeply") as caught:
        json_limits.decode_body(msgspec.json.Decoder(), body)
    assert caught.value.param is None


@pytest.mark.parametrize("piece", [b'"ab', b'"[', b'"]"[]'], ids=["text", "brackets in strings", "pairs"])
def test_the_memory_of_finding_the_depth_is_bounded_by_the_body(piece: bytes) -> None:
    body = b"[" * 200 + piece * (2_000_000 // len(piece))
    tracemalloc.start()
    try:
        assert json_limits.is_too_deep(body)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
    finally:
        tracemalloc.stop()


def separators(value: Any) -> int:
    """As a decoder sees them."""
    if not isinstance(value, list | dict):
        return 0
    inner = value if isinstance(value, list) else list(value.values())
    return 1 + max(0, len(inner) - 1) + sum(map(separators, inner))


@given(VALUES, st.integers(0, 12))
def test_only_values_count_whatever_strings_contain(value: Any, limit: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "MAX_VALUES", limit)
        try:
            json_limits.check_values(body)
            accepted = True
        except PayloadTooLarge:
            accepted = False
    if separators(value) > limit and len(body) > limit:
        assert not accepted
    elif separators(value) <= limit and body.count(b'"') <= 2 * limit:
        assert accepted


@pytest.mark.parametrize(
    "text", [rb"\ud83d", rb"\ud83dx", rb"\uD83D and more text", rb"\ude00", rb"\ud83d\ud83d"]
)
def test_half_of_a_surrogate_pair_is_named(text: bytes) -> None:
    with pytest.raises(BadRequest, match="half of a surrogate pair"):
        decode_body(msgspec.json.Decoder(dict[str, str]), b'{"a": "%b"}' % text)


@pytest.mark.parametrize("body", [b'{"a": "x', rb'{"a": "\ud83', b'{"a": "x"', b'{"a": "\\u00'])
def test_a_cut_body_is_called_truncated(body: bytes) -> None:
    with pytest.raises(BadRequest, match="truncated"):
        decode_body(msgspec.json.Decoder(dict[str, str]), body)
