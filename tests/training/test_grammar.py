"""Paraphrase grammars, and the patterns that are written in them."""

import random
import string

import pytest

from corpus import grammar, greetings, small_talk, tool_catalog, tool_requests


def test_a_pattern_stands_for_all_its_choices() -> None:
    rng = random.Random(1)
    made = {grammar.expand(rng, "[a|b [c|d]] {x}[|!]") for _ in range(300)}
    assert made == {"a {x}", "a {x}!", "b c {x}", "b c {x}!", "b d {x}", "b d {x}!"}


def test_left_out_words_leave_no_spaces() -> None:
    assert grammar.pick(random.Random(1), ("[|] say [] {x} []?",)) == "say {x}?"


@pytest.mark.parametrize("intent", greetings.PATTERNS)
def test_every_greeting_has_a_reply_and_is_plain_text(intent: str) -> None:
    assert intent in small_talk.INTENTS
    rng = random.Random(intent)
    for _ in range(200):
        text = grammar.pick(rng, greetings.PATTERNS[intent])
        assert text
        assert not set(text) & set("[]|{}"), text


@pytest.mark.parametrize("name", tool_requests.REQUESTS)
def test_requests_state_only_parameters_that_their_tool_has(name: str) -> None:
    tools = [tool for tool in tool_catalog.CATALOG if tool.name == name]
    known = {parameter.name for tool in tools for parameter in tool.parameters}
    for pattern in tool_requests.REQUESTS[name]:
        assert {field for _, field, _, _ in string.Formatter().parse(pattern) if field} <= known
