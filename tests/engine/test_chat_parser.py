"""Parsing a chat model's output into reasoning, content and tool calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Set

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy_engine.parsers.chat_parser import ChatParser, Qwen3ReasoningParser
from argosy_engine.parsers.parsed_output import Parsed, ParsedCall
from argosy_engine.parsers.tool_parsers.json_tool_parsers import HermesToolParser
from parsed_parts import cut, however_cut, joined

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NAN_CALL = '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'
PARIS = ParsedCall("get_weather", '{"city": "Paris"}')
HALF_CALL = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'
PARSES = [
    ("plain", "Hello there.", Parsed("", "Hello there.")),
    ("thinking", "<think>\nTwo and two.\n</think>\n\nFour.", Parsed("Two and two.", "Four.")),
    ("empty think", "<think>\n\n</think>\n\nHi", Parsed("", "Hi")),
    ("unclosed think", "<think>\nhmm", Parsed("hmm", "")),
    ("angle bracket", "<thin ice> a < b", Parsed("", "<thin ice> a < b")),
    ("call", CALL, Parsed("", "", (PARIS,))),
    (
        "text and call",
        "Let me look.\n" + CALL,
        Parsed("", "Let me look.", (PARIS,)),
    ),
    ("two calls", CALL + "\n" + CALL, Parsed("", "", (PARIS,) * 2)),
    ("broken call", "<tool_call>{nope}</tool_call>", Parsed("", "<tool_call>{nope}</tool_call>")),
    ("no JSON", NAN_CALL, Parsed("", "", (ParsedCall("f", '{"a": NaN}'),))),
    ("half a pair", HALF_CALL, Parsed("", "", (ParsedCall("f", '{"a": "\\ud83d"}'),))),
    ("half a name", HALF_CALL.replace('"f"', '"\\ud83d"'), Parsed("", HALF_CALL.replace('"f"', '"\\ud83d"'))),
    ("unclosed call", '<tool_call>{"name": "x"', Parsed("", '<tool_call>{"name": "x"')),
    ("trailing newlines", "Done.\n\n", Parsed("", "Done.\n\n")),
]


def chat_parser(*, is_reasoning: bool = False, calls_end_reasoning: bool = False) -> ChatParser:
    return ChatParser(
        reasoning_parser=Qwen3ReasoningParser(),
        tool_parser=HermesToolParser(),
        is_reasoning=is_reasoning,
        calls_end_reasoning=calls_end_reasoning,
    )


def parse(parser: ChatParser, parts: list[str]) -> Parsed:
    return joined([parser.feed(part, number == len(parts)) for number, part in enumerate(parts, 1)])


@pytest.mark.parametrize(("name", "text", "expected"), PARSES, ids=[name for name, _, _ in PARSES])
@however_cut
def test_chat_parser(name: str, text: str, expected: Parsed, cuts: Set[int]) -> None:
    assert parse(chat_parser(), cut(text, cuts)) == expected


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                '{"name": "f"}',
                '{"name": "f", "arguments": {"a": "',
                '"}}',
                "\n",
                "\n" * 9,
                "a",
                "<",
                "t",
            ]
        ),
        max_size=12,
    ),
    cuts=st.sets(st.integers(0, 120)),
    is_reasoning=st.booleans(),
    calls_end_reasoning=st.booleans(),
)
def test_chat_parser_does_not_care_how_text_is_cut(
    pieces: list[str], cuts: set[int], is_reasoning: bool, calls_end_reasoning: bool
) -> None:
    text = "".join(pieces)

    def new() -> ChatParser:
        return chat_parser(is_reasoning=is_reasoning, calls_end_reasoning=calls_end_reasoning)

    def resumed(parts: list[str], seam: int = 0) -> Parsed:
        """Parse with two parsers: the second continues at `seam`, as in an engine that resumes a stream."""
        parser = new()
        parsed = [parser.feed(part) for part in parts[:seam]]
        parser = new()
        parser.feed("".join(parts[:seam]))
        parsed += [
            parser.feed(part, index == len(parts)) for index, part in enumerate(parts[seam:], seam + 1)
        ]
        return joined(parsed)

    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    for seam in range(len(parts)):
        assert resumed(parts, seam) == resumed([text])


@pytest.mark.parametrize("before", ["", "<think>", "<think>a</think>", "word"])
def test_newlines_alone_are_content(before: str) -> None:
    parser = chat_parser()
    parser.feed(before)
    heard = [parser.feed("\n") for _ in range(100)]
    assert sum(len(part.content) + len(part.reasoning) for part in heard) > 50


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm", "Hm", ""),
        ("<think>again</think>x", "<think>again", "x"),
    ],
)
@however_cut
def test_text_that_begins_within_a_thought(text: str, reasoning: str, content: str, cuts: Set[int]) -> None:
    parsed = parse(chat_parser(is_reasoning=True), cut(text, cuts))
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("<think>I ask." + CALL, "I ask.", "", 1),
        ("<think>I ask.\n" + CALL + "\n" + CALL + "\n", "I ask.", "", 2),
        ("<think>I ask.\n" + CALL + "\n<tool_call>", "I ask." + CALL + "\n<tool_call>", "", 0),
        ("<think>Perhaps " + CALL + "\n? No.\n</think>{}", "Perhaps " + CALL + "\n? No.", "{}", 0),
        ("<think>Perhaps " + CALL + "\n</think>\nNo.", "Perhaps " + CALL, "No.", 0),
        ("<think>a " + CALL + CALL + " or b</think>" + CALL, "a " + CALL * 2 + " or b", "", 1),
        ("<think>a " + CALL + "<tool_call>{</think>b", "a " + CALL + "<tool_call>{", "b", 0),
        ("<think>I could write <tool_call>.</think>No.", "I could write <tool_call>.", "No.", 0),
        ("<think>a <tool_call>nope</tool_call> b</think>c", "a <tool_call>nope</tool_call> b", "c", 0),
        ("<think>cut <tool_call>{", "cut <tool_call>{", "", 0),
        ("<think>a</think>" + CALL, "a", "", 1),
    ],
)
@however_cut
def test_calls_in_a_thought_count_if_the_output_ends_with_them(
    text: str, reasoning: str, content: str, num_calls: int, cuts: Set[int]
) -> None:
    parser = chat_parser(calls_end_reasoning=True)
    parsed = parse(parser, cut(text, cuts))
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert parser.num_calls == num_calls


def assert_linear(seconds: Callable[[int], float], size: int) -> None:
    """Eight times as much takes less than 24 times as long, not 64 times; at the first attempt on a quiet machine."""
    assert any(seconds(8 * size) < 24 * seconds(size) for _ in range(5))


def test_without_tools_a_call_is_text() -> None:
    assert ChatParser().feed(CALL, True).content == CALL


@pytest.mark.parametrize("piece", ["abcd", "</think>"])
@pytest.mark.parametrize("is_reasoning", [False, True], ids=["content", "reasoning"])
def test_an_unclosed_call_is_read_in_linear_time(is_reasoning: bool, piece: str) -> None:
    def feed_s(num_deltas: int) -> float:
        parser = chat_parser(is_reasoning=is_reasoning, calls_end_reasoning=True)
        start = time.thread_time()
        parser.feed("x<tool_call>")
        for _ in range(num_deltas):
            parser.feed(piece)
        return time.thread_time() - start

    assert_linear(feed_s, 10_000)


def test_many_calls_in_a_long_thought_are_read_in_linear_time() -> None:
    def feed_s(count: int) -> float:
        parser = chat_parser(is_reasoning=True, calls_end_reasoning=True)
        start = time.thread_time()
        parser.feed("<tool_call></tool_call>" * count + "</think>", True)
        return time.thread_time() - start

    assert_linear(feed_s, 1_500)
