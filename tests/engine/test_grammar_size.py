"""Size bounds of regular expressions, EBNF grammars and structural tags, with repetitions expanded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.grammar_checks import MAX_UNBOUNDED, grammar_size, pattern_size
from argosy_engine.structured.json_schema import normalized_schema
from argosy_engine.structured.structured_outputs_params import StructuredOutputsParams


def tag(*formats: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "sequence", "elements": list(formats)}}


STARS = '".*"' * 2000

TOO_LARGE: list[tuple[str, Any, str]] = [
    ("regex", STARS, "without an upper bound"),
    ("regex", "(a*){100}", "without an upper bound"),
    ("regex", "(" * 70 + "a" + ")*" * 70, "without an upper bound"),
    ("regex", "(a{2,}b+){50}", "without an upper bound"),
    ("regex", ".{1,5000}", "too large"),
    ("regex", "((a{50}){50}){50}", "too large"),
    ("json", {"type": "string", "pattern": "a*" * 200}, "without an upper bound"),
    ("grammar", "root ::= " + '"a"* ' * 500, "without an upper bound"),
    ("grammar", 'root ::= ("a"* "b"){ 1, 500 }', "without an upper bound"),
    ("grammar", "root ::= [a-z]{1,9999}", "too large"),
    ("grammar", 'root ::= x\nx ::= ("a" # a comment with ) in it\n{100} "b"){100}', "too large"),
    ("structural_tag", tag({"type": "regex", "pattern": "x*" * 100}), "without an upper bound"),
    ("structural_tag", tag(*[{"type": "regex", "pattern": "x*" * 30}] * 10), "without an upper bound"),
    ("structural_tag", tag({"type": "grammar", "grammar": "root ::= " + "[a]+ " * 300}), "without an upper"),
    (
        "structural_tag",
        tag({"type": "repeat", "min": 0, "max": 400, "content": {"type": "regex", "pattern": "a*"}}),
        "without an upper bound",
    ),
    (
        "structural_tag",
        tag({"type": "repeat", "min": 1, "max": 9999, "content": {"type": "const_string", "value": "a"}}),
        "too large",
    ),
]


@pytest.mark.parametrize(
    ("kind", "value", "says"), TOO_LARGE, ids=[f"{kind} {str(value)[:40]}" for kind, value, _ in TOO_LARGE]
)
def test_a_grammar_that_grows_too_large_is_refused_before_it_is_compiled(
    kind: str, value: Any, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        msgspec.convert({kind: value}, StructuredOutputsParams).spec()
    assert raised.value.param == f"structured_outputs.{kind}"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "Name: .*\nAge: \\d+\n" * 30),
        ("regex", "x" * 8000),
        ("regex", "[0-9]{1,200}"),
        ("regex", "([0-9]{3}-){25}"),
        ("grammar", "root ::= sum\n" + "\n".join(f'r{i} ::= [a-z]* " " r{i}' for i in range(100))),
        ("grammar", 'root ::= "' + "x" * 100_000 + '"'),
        ("grammar", 'root ::= "****{9999}" [*+]'),
        ("structural_tag", tag(*[{"type": "any_text"}] * 200)),
        ("choice", ["*" * 1000, "a{9999}"]),
    ],
)
def test_common_grammars_are_accepted(kind: str, value: Any) -> None:
    assert msgspec.convert({kind: value}, StructuredOutputsParams).spec().text


@pytest.mark.parametrize(
    ("pattern", "unbounded"),
    [("", 0), ("a*", 1), ("a*b+c?", 2), ("(a*){3}", 3), ("(a*b{2,}){3}", 6), ("((a*)*)*", 3), (r"\*[*+]", 0)],
)
def test_unbounded_repetitions_are_counted_written_out(pattern: str, unbounded: int) -> None:
    assert pattern_size(pattern).unbounded == unbounded


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('root ::= "a" | rule', (3, 3, 0)),
        ('root ::= ("a" b){3}', (3, 7, 0)),
        ('root ::= "(*" [)+]* # {9}', (3, 3, 1)),
        ('root ::= "a\\"*" [\\]*]{2,}', (3, 4, 1)),
    ],
)
def test_grammar_size_reads_literals_classes_and_comments(text: str, size: tuple[int, int, int]) -> None:
    assert tuple(grammar_size(text)) == size


def test_sizes_are_counted_in_linear_time_and_bounded_memory() -> None:
    size = pattern_size("(" * 5000 + "a*" + "){9}" * 5000)
    assert size.unbounded > MAX_UNBOUNDED
    assert size.unbounded < 1 << 64


@pytest.mark.parametrize(("apart", "is_taken"), [(9_999, True), (10_000, False)])
def test_a_multiple_in_a_range_is_taken_only_where_it_is_enforced(apart: int, is_taken: bool) -> None:
    """From 10,000 on XGrammar drops `multipleOf`, and 1 would be a multiple of 3."""
    schema = {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": apart}
    if is_taken:
        assert normalized_schema(schema)
    else:
        with pytest.raises(InvalidRequest, match="at most"):
            normalized_schema(schema)


@pytest.mark.parametrize("low", [-5_000, 0, 7])
def test_multiples_are_enforced_over_the_widest_range(low: int) -> None:
    import json

    from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

    vocabulary = [*"0123456789-", ""]
    compiler = GrammarCompiler(TokenizerInfo(vocabulary, stop_token_ids=[11]), max_threads=1)
    schema = {"type": "integer", "multipleOf": 3, "minimum": low, "maximum": low + 9_999}
    grammar = compiler.compile_json_schema(normalized_schema(schema))
    for value in (*range(low - 3, low + 6), *range(low + 9_994, low + 10_003)):
        matcher = GrammarMatcher(grammar)
        is_matched = matcher.accept_string(json.dumps(value)) and matcher.accept_token(11)
        assert is_matched == (value % 3 == 0 and low <= value <= low + 9_999), value
