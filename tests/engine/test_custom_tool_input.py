"""The input of a custom tool, read from the arguments of a function while a model writes them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.api.endpoints.response_events import CustomToolInput

ARGUMENTS = {
    "a text": ('{"input": "ls -l"}', "ls -l"),
    "no white space": ('{"input":"ls"}', "ls"),
    "much white space": ('\n { "input"\t:\n "ls" \n}\n', "ls"),
    "escapes": ('{"input": "a\\n\\"b\\"\\\\ \\/\\t\\u00e9"}', 'a\n"b"\\ /\t\u00e9'),
    "a pair": ('{"input": "\\ud83d\\ude00!"}', "\U0001f600!"),
    "half a pair": ('{"input": "\\ud83d!"}', "\ufffd!"),
    "two first halves": ('{"input": "\\ud83d\\ud83d\\ude00"}', "\ufffd\U0001f600"),
    "the second half first": ('{"input": "\\ude00\\ud83d"}', "\ufffd\ufffd"),
    "half a pair, as it is": ('{"input": "a\ud83db"}', "a\ufffdb"),
    "lines as they are": ('{"input": "a\nb"}', "a\nb"),
    "an escape that JSON does not have": ('{"input": "\\d+\\u12x"}', "\\d+\\u12x"),
    "another argument after it": ('{"input": "ls", "why": "x"}', "ls"),
    "another argument before it": ('{"why": "x", "input": "ls"}', "ls"),
    "another argument": ('{"cmd": "ls"}', "ls"),
    "two others": ('{"cmd": "ls", "n": 1}', '{"cmd": "ls", "n": 1}'),
    "no text": ('{"input": 5}', '{"input": 5}'),
    "a text alone": ('"ls"', "ls"),
    "no JSON": ("ls -l", "ls -l"),
    "no JSON, with half a pair": ("ls \ud83d", "ls \ufffd"),
    "nothing": ("", ""),
    "an empty input": ('{"input": ""}', ""),
    "a long head": (" " * 300 + '{"input": "ls"}', "ls"),
    "cut in the text": ('{"input": "ls -', "ls -"),
    "cut in an escape": ('{"input": "a\\', "a"),
    "cut in a code": ('{"input": "a\\u00', "a"),
    "cut in a pair": ('{"input": "a\\ud83d', "a\ufffd"),
    "cut in the head": ('{"inp', ""),
    "cut before the text": ('{ "input" :', ""),
    "no JSON that begins like it": ('{ "inp; }', '{ "inp; }'),
    "deep": ('{"x":' + "[" * 100_000, '{"x":' + "[" * 100_000),
}


def read(pieces: list[str]) -> tuple[list[str], str]:
    custom = CustomToolInput()
    said = [*map(custom.feed, pieces), custom.end()]
    return said, custom.text


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_the_input_is_the_text_however_its_arguments_come(arguments: str, expected: str) -> None:
    for pieces in ([arguments], list(arguments), [arguments[:7], arguments[7:]]):
        said, text = read(pieces)
        assert text == expected
        assert "".join(said) == expected
        text.encode()


def test_the_text_comes_while_it_is_written() -> None:
    assert read(['{"input": "a', "b\\", 'n"', "}"])[0] == ["a", "b", "\n", "", ""]


@given(st.text(), st.sets(st.integers(1, 80), max_size=9), st.booleans())
def test_any_text_is_read_from_any_pieces(text: str, cuts: set[int], is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    ends = [*sorted(cut for cut in cuts if cut < len(arguments)), len(arguments)]
    said, made = read([arguments[a:b] for a, b in zip([0, *ends], ends, strict=False)])
    assert made == "".join(said) == text


@given(st.text(alphabet='{}[]":\\un input0d8\ud83d,', max_size=60), st.integers(0, 60), st.booleans())
def test_whatever_a_model_writes_can_be_sent(written: str, cut: int, has_head: bool) -> None:
    arguments = ('{"input": "' if has_head else "") + written
    said, text = read([arguments[:cut], arguments[cut:]])
    assert "".join(said) == text == read(list(arguments))[1]
    text.encode()
