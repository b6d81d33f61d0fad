"""JSON of the API server that nests deeper than Python reads."""

from __future__ import annotations

import json
import time
import timeit
from typing import Any

import pytest

from argosy_protocol.json_limits import CUT_DEPTH, TOKENS_PER_STEP, cut, cutting, loads


def nested(levels: int, value: str = "1") -> str:
    return '{"a":[' * (levels // 2) + value + "]}" * (levels // 2)


def depth(value: Any) -> int:
    levels = 0
    while isinstance(value, dict | list):
        value = value["a"] if isinstance(value, dict) else value[0]
        levels += 1
    return levels


@pytest.mark.parametrize("levels", [2, CUT_DEPTH, 2 * CUT_DEPTH])
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
    assert depth(found["deep"]) == CUT_DEPTH - 1
    assert (found["list"][0], depth(found["list"][1]), found["list"][2]) == (1, CUT_DEPTH - 2, 2)


@pytest.mark.parametrize("text", [nested(10_000)[:-1], nested(10_000) + "}", "", "{"])
def test_what_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        loads(text)


def test_a_large_object_is_cut_in_steps() -> None:
    """One of a pod held a router's event loop for a tenth of a second, with each of its changes."""
    text = f'{{"deep": [{nested(10_000)}{",[]" * (12 * TOKENS_PER_STEP // 2)}], "name": "a"}}'
    steps = cutting(text)
    number = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = json.loads(end.value)
            break
        number += 1
    assert number >= 12
    assert found["name"] == "a"
    assert depth(found["deep"]) == CUT_DEPTH - 1
    assert loads(text) == found


def test_a_long_text_in_a_deep_object_costs_little() -> None:
    """It was matched character by character: one of a megabyte took a quarter of a second, and a hundred times its
    size. CPU times are compared."""

    def cpu_s(length: int) -> float:
        text = nested(5000, f'"{"a" * length}"')
        return min(timeit.repeat(lambda: cut(text), number=1, repeat=3, timer=time.process_time))

    assert cpu_s(1 << 20) < 4 * cpu_s(1)
