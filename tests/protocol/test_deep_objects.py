"""JSON of the API server that nests deeper than Python reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_protocol.deep_json import MAX_DEPTH, loads


def nested(levels: int, value: str = "1") -> str:
    return '{"a":[' * (levels // 2) + value + "]}" * (levels // 2)


def depth(value: Any) -> int:
    levels = 0
    while isinstance(value, dict | list):
        value = value["a"] if isinstance(value, dict) else value[0]
        levels += 1
    return levels


@pytest.mark.parametrize("levels", [2, MAX_DEPTH, 2 * MAX_DEPTH])
def test_what_python_reads_is_read_as_it_is(levels: int) -> None:
    text = nested(levels, r'"}[\"]{"')
    assert loads(text) == json.loads(text)
    assert loads(text.encode()) == json.loads(text)


def test_of_what_it_does_not_read_the_first_levels_are() -> None:
    text = f'{{"deep": {nested(10_000)}, "text": "}}[\\"]{{", "after": {nested(4)}, "list": [1, {nested(3000)}, 2]}}'
    with pytest.raises(RecursionError):
        json.loads(text)
    found = loads(text)
    assert (found["text"], found["after"]) == ('}["]{', {"a": [{"a": [1]}]})
    assert depth(found["deep"]) == MAX_DEPTH - 1
    assert (found["list"][0], depth(found["list"][1]), found["list"][2]) == (1, MAX_DEPTH - 2, 2)


@pytest.mark.parametrize("text", [nested(10_000)[:-1], nested(10_000) + "}", "", "{"])
def test_what_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        loads(text)
