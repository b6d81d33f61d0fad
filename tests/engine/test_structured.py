"""Structured outputs below the engine: validation, compilation, and following a grammar."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.grammar_checks import MAX_PATTERN_SIZE, least_json_size, pattern_size
from argosy_engine.structured.grammar_state import GrammarPhase, GrammarState, Reasoning, reasoning_after
from argosy_engine.structured.json_schema import MAX_DEPTH, normalized_schema
from argosy_engine.structured.structural_tag import normalized_tag, tool_call_tag
from argosy_engine.structured.structured_outputs_params import GrammarSpec, StructuredOutputsParams
from argosy_engine.structured.xgrammar_backend import Vocabulary, XGrammarBackend
from cpu_times import least_ratio

EOS = 2
THINK, END_THINK = 1018, 1019

# What is accepted


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "structured_outputs", "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs", "regex and choice"),
        ({"json": "{"}, "structured_outputs.json", "not valid JSON"),
        ({"json": '{"minimum": NaN}'}, "structured_outputs.json", "NaN"),
        ({"json": '{"maximum": 1e400}'}, "structured_outputs.json", "too large"),
        ({"json": {"maximum": 10**400}}, "structured_outputs.json", "too large"),
        ({"json": {"const": -(10**400)}}, "structured_outputs.json", "too large"),
        ({"json": '{"const": "\\ud800"}'}, "structured_outputs.json", "surrogates"),
        ({"json": "[" * 100_000}, "structured_outputs.json", "nested too deeply"),
        ({"json": json.dumps({"description": "x" * 200_000})}, "structured_outputs.json", "bytes"),
        ({"regex": ""}, "structured_outputs.regex", "between 1 and"),
        ({"regex": "a" * 10_000}, "structured_outputs.regex", "bytes"),
        ({"regex": "\ud800"}, "structured_outputs.regex", "surrogates"),
        ({"choice": []}, "structured_outputs.choice", "at least one"),
        ({"choice": [""]}, "structured_outputs.choice", "empty"),
        ({"choice": [str(i) for i in range(2000)]}, "structured_outputs.choice", "at most"),
        ({"grammar": "x" * 200_000}, "structured_outputs.grammar", "bytes"),
        ({"structural_tag": {"type": "structural_tag"}}, "structured_outputs.structural_tag", "format"),
        ({"structural_tag": "[]"}, "structured_outputs.structural_tag", "object"),
        ({"json": {}, "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "not supported"),
        ({"json": {}, "_backend": "guidance"}, "structured_outputs._backend", "has xgrammar"),
        *[
            ({"grammar": grammar}, "structured_outputs.grammar", "looks like Lark")
            for grammar in (
                'start: "aaa" | "bbb"',
                '// one of two\n?start: "a"\n  | "b"',
                "%import common.WORD\nstart: WORD",
                "!start.2 : A\nA: /a+/",
            )
        ],
        (
            {"structural_tag": {"format": {"type": "grammar", "grammar": 'start: "a"'}}},
            "structured_outputs.structural_tag",
            "looks like Lark",
        ),
    ],
)
def test_malformed_requests_name_the_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        msgspec.convert(fields, StructuredOutputsParams).spec()
    assert raised.value.param == param


def test_all_fields_of_vllm_may_be_given_with_their_defaults() -> None:
    given = {
        **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "structural_tag")),
        **dict.fromkeys(("whitespace_pattern", "_backend")),
        **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), False),
        **dict.fromkeys(("disable_fallback", "_backend_was_auto"), False),
        "regex": "a",
    }
    alone = StructuredOutputsParams(regex="a").spec()
    assert msgspec.convert(given, StructuredOutputsParams).spec() == alone
    chosen = {"disable_additional_properties": True, "_backend": "xgrammar", "_backend_was_auto": True}
    assert msgspec.convert({**given, **chosen}, StructuredOutputsParams).spec() == alone
    assert StructuredOutputsParams(json={}, whitespace_pattern=None).spec().kind == "json"


def test_a_colon_in_a_grammar_does_not_make_it_lark() -> None:
    grammar = 'root ::= "a: " b\nb ::= "c:" | "\\n"\n'
    assert StructuredOutputsParams(grammar=grammar).spec().text == grammar


REFUSED = [
    ({"type": "object", "not": {}}, "keyword not "),
    ({"if": {}, "then": {}}, "keyword if "),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, "multipleOf"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "beside pattern"),
    ({"type": "string", "format": "iban"}, "'iban'"),
    ({"type": "string", "pattern": ".{1,5000}"}, "too large"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"type": "text"}, "type must be"),
    ({"type": []}, "type must be"),
    ({"maxLength": 3}, "maxLength needs a type"),
    ({"required": ["a"]}, "required needs a type"),
    ({"type": "object", "required": ["a"], "properties": {"b": {}}}, "'a'"),
    (
        {"type": "object", "properties": {"a": {"type": "object", "dependentRequired": {}}}},
        r"\$.properties.a",
    ),
    ({"type": "object", "patternProperties": {"a": {}}, "additionalProperties": {}}, "patternProperties"),
    ({"type": "object", "propertyNames": {}, "additionalProperties": {"type": "integer"}}, "propertyNames"),
    ({"allOf": [{"type": "object"}, {"type": "object"}]}, "allOf"),
    ({"anyOf": [{"type": "string"}], "minLength": 3}, "minLength beside anyOf"),
    ({"anyOf": [{"required": ["a"]}], "type": "object"}, "type beside anyOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"const": 1}, {"enum": [1, 2]}]}, "oneOf"),
    ({"enum": [1, "a"], "type": "string"}, "no string"),
    ({"enum": []}, "at least one value"),
    ({"const": "ab", "maxLength": 1}, "maxLength beside const"),
    ({"$ref": "#"}, "leads back"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "leads back"),
    ({"$ref": "#/$defs/a"}, "nowhere"),
    ({"$ref": "https://example.org/schema"}, "inside this schema"),
    ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "keyword not "),
    ({"properties": {"a": False}}, "'false'"),
    ({"items": [{"type": "string"}]}, "a schema is an object"),
    (7, "a schema is an object"),
    ({"type": "string", "format": ["date"]}, "format must be a string"),
    ({"oneOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": 5}] * 2}, "oneOf"),
]


WORDS = st.sampled_from(
    ["a", "type", "object", "array", "string", "integer", "properties", "required", "items", "prefixItems", "anyOf",
     "oneOf", "allOf", "const", "enum", "$ref", "#/$defs/a", "$defs", "minimum", "multipleOf", "maxLength", "pattern",
     "format", "minItems", "additionalProperties", "patternProperties", "propertyNames", "maxProperties", "tags",
     "json_schema", "structures", "triggers", "begin", "end", "schema"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_any_value_is_a_grammar_or_a_reason(value: Any) -> None:
    for fields in ({"json": value}, {"structural_tag": value}, {"json": json.dumps(value)}):
        try:
            spec = StructuredOutputsParams(**fields).spec()
        except InvalidRequest:
            continue
        assert msgspec.msgpack.encode(spec)


def test_constraints_that_cannot_be_enforced_are_refused() -> None:
    def message(schema: Any) -> str:
        try:
            return f"accepted: {normalized_schema(schema)}"
        except InvalidRequest as error:
            return str(error)

    told = [(json.dumps(schema)[:100], says, message(schema)) for schema, says in REFUSED]
    assert [each for each in told if not re.search(each[1], each[2])] == []


def test_annotations_unknown_keywords_and_unused_definitions_pass() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T", "description": "d", "x-order": 1, "$defs": {"unused": {"not": {}}},
        "type": "object",
        "properties": {"a": {"type": "string", "format": "password"}, "b": {"type": ["integer", "null"], "default": 1}},
        "required": ["a"],
    }  # fmt: skip
    assert json.loads(normalized_schema(schema)) == schema


def test_untyped_containers_stay_open() -> None:
    assert json.loads(normalized_schema({"type": "object"})) == {
        "type": "object",
        "additionalProperties": True,
    }
    assert json.loads(normalized_schema({"type": "array"})) == {"type": "array", "items": True}


def test_the_caller_keeps_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    normalized_schema(schema)
    assert schema == {"type": "object", "properties": {"a": {"type": "array"}}}


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 20_000])
def test_deep_schemas_are_refused(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    try:
        with pytest.raises(InvalidRequest, match="deeper"):
            normalized_schema(schema)
    finally:
        while schema:  # the interpreter's own teardown of the nest is recursive
            schema = schema.pop("items")


def test_wide_schemas_are_refused() -> None:
    counted = {"type": "object", "minProperties": 1, "properties": {f"p{i}": {} for i in range(500)}}
    with pytest.raises(InvalidRequest, match="too large"):
        normalized_schema(counted)
    del counted["minProperties"]
    normalized_schema(counted)


def one_of_references(scale: int) -> dict[str, Any]:
    """Options that are one definition, with many properties."""
    names = [f"p{i}" for i in range(scale)]
    definition = {"type": "object", "properties": {name: {"const": 1} for name in names}, "required": names}
    return {"oneOf": [{"$ref": "#/$defs/d"}] * scale, "$defs": {"d": definition}}


def one_of_many_tags(scale: int) -> dict[str, Any]:
    """Distinct options, none of which has the many tags of the first."""
    names = [f"p{i}" for i in range(scale)]
    first = {"type": "object", "properties": {name: {"const": 1} for name in names}, "required": names}
    other = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    return {"oneOf": [first, *[dict(other) for _ in range(scale)]]}


def chained_references(scale: int) -> dict[str, Any]:
    """References into a chain of references, each at another place."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(scale)} | {f"d{scale}": {}}
    return {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(scale)], "$defs": definitions}


def one_of_one_enum(scale: int) -> dict[str, Any]:
    values = {"type": "object", "properties": {"k": {"enum": list(range(scale))}}, "required": ["k"]}
    return {"oneOf": [{"$ref": "#/$defs/e"}] * scale, "$defs": {"e": values}}


def enums_of_one_hash(scale: int) -> dict[str, Any]:
    """Numbers with one remainder modulo Python's 2**61 - 1."""
    values = [i * ((1 << 61) - 1) for i in range(1, scale)]
    return one_of_kinds({"enum": values}, {"enum": [-1]})


@pytest.mark.parametrize(
    ("schema_of", "scale"),
    [
        (one_of_references, 100),
        (one_of_many_tags, 100),
        (chained_references, 100),
        (one_of_one_enum, 300),
        (enums_of_one_hash, 500),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_schemas_are_checked_in_time_linear_in_their_text(
    schema_of: Callable[[int], dict[str, Any]], scale: int
) -> None:
    small, large = schema_of(scale), schema_of(8 * scale)
    growth = len(json.dumps(large)) / len(json.dumps(small))
    assert least_ratio(lambda: check(small), lambda: check(large), 3 * growth) < 3 * growth


def check(schema: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        normalized_schema(schema)


def test_schemas_of_one_request_share_a_limit() -> None:
    parameters = {
        "type": "object",
        "properties": {f"r{i}": {"$ref": "#/$defs" + "/" * i + "d"} for i in range(1, 20)},
        "$defs": {"d": {"type": "object", "properties": {f"p{i}": {} for i in range(500)}}},
    }
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(12)]
    tool_call_tag(tools[:4])
    with pytest.raises(InvalidRequest, match="too large"):
        tool_call_tag(tools)
    contents = [{"type": "json_schema", "json_schema": parameters}] * 12
    with pytest.raises(InvalidRequest, match="too large"):
        normalized_tag({"format": {"type": "sequence", "elements": contents}})


def test_a_structured_output_is_checked_once_for_all_prompts_of_a_call() -> None:
    params = StructuredOutputsParams(json={"type": "object"})
    assert params.spec() is params.spec()


class Unread(dict[str, Any]):
    """An object whose values must not be read."""

    def values(self) -> Any:
        pytest.fail("it was looked at")

    items = values


MILLION = {"enum": [0] * (1 << 20)}


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_a_value_that_is_too_large_is_refused_before_it_is_written(kind: str) -> None:
    params = StructuredOutputsParams(**{kind: {"unread": Unread(a=1), "many": MILLION["enum"]}})
    with pytest.raises(InvalidRequest, match="has more") as raised:
        params.spec()
    assert raised.value.param == f"structured_outputs.{kind}"


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
))  # fmt: skip
def test_the_least_size_of_a_value_is_at_most_that_of_its_text(value: Any) -> None:
    least = least_json_size(value, 1 << 20)
    assert 0 < least <= len(json.dumps(value, ensure_ascii=False))
    assert least_json_size(value, least - 1) == least


def test_tools_that_are_too_large_together_are_refused_before_they_are_looked_at() -> None:
    def tool(parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    described = tool({"type": "object", "properties": {}, "description": "x" * 40_000})
    assert tool_call_tag([described] * 3)
    for last in (described, tool({"type": "object", "properties": {"p": MILLION}})):
        with pytest.raises(InvalidRequest, match="together exceed"):
            tool_call_tag([described, described, described, last, tool(Unread(type="object"))])
    with pytest.raises(InvalidRequest, match="surrogates"):
        tool_call_tag([tool({"type": "object", "description": "\ud800"})])


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0), ("abc", 3), ("a{3}", 3), ("a{2,5}b", 6), ("(ab){3}", 6), ("(a{2}b){3}", 9), ("[a-z]{4}", 4),
        ("[]a]{2}", 2), (r"[\]{9}]{2}", 2), (r"\{3}", 3), ("a{x}", 4), ("a*b+c?", 3), ("a{0}", 1), ("((((a))))", 1),
        ("a{1,99999999999999}", 1 << 30), ("a|b{2}", 3), (")(", 1),
    ],
)  # fmt: skip
def test_pattern_size_counts_repetitions_written_out(pattern: str, size: int) -> None:
    assert pattern_size(pattern).written_out == size


def test_pattern_size_is_linear_in_the_pattern() -> None:
    assert pattern_size("(" * 5000 + "a" + "){9}" * 5000).written_out > MAX_PATTERN_SIZE


def test_tool_calls_become_tags_for_the_tools_asked_for() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in ("a", "mcp.b-2_c")
    ]
    both = json.loads(tool_call_tag(tools))["format"]
    assert [tag["begin"].split("name")[1] for tag in both["tags"]] == [
        '": "a", "arguments": ',
        '": "mcp.b-2_c", "arguments": ',
    ]
    assert both["at_least_one"]
    assert not both["stop_after_first"]
    one = json.loads(tool_call_tag(tools, name="a"))["format"]
    assert len(one["tags"]) == 1
    assert one["stop_after_first"]
    for bad, param in (
        (lambda: tool_call_tag(tools, name="c"), "tool_choice"),
        (lambda: tool_call_tag([{"type": "function"}]), "tools[0]"),
        (lambda: tool_call_tag([{"function": {"name": "a{name}"}}]), "tools[0].function.name"),
        (
            lambda: tool_call_tag(
                [{"function": {"name": "x", "strict": True, "parameters": {"type": "object", "not": {}}}}]
            ),
            "tools[0].function.parameters",
        ),
    ):
        with pytest.raises(InvalidRequest) as raised:
            bad()
        assert raised.value.param == param


FREE = {"type": "object", "additionalProperties": True}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(("parameters", "enforced"), [
    (None, EMPTY),
    ({}, EMPTY),
    ({"type": "object", "properties": {}}, EMPTY),
    ({"properties": {}, "required": None}, EMPTY),
    ({"type": "object"}, FREE),
    ({"type": "object", "properties": None, "required": None}, FREE),
    ({"type": "object", "properties": {}, "additionalProperties": True}, {"properties": {}, **FREE}),
    ({"description": "anything"}, {"description": "anything", **FREE}),
    ({**OBJECT, "required": None}, OBJECT),
    (
        {"type": "object", "properties": {"a": {"type": "object", "properties": None, "required": None}}},
        {"type": "object", "properties": {"a": FREE}},
    ),
    ({"anyOf": [OBJECT, OBJECT]}, {"anyOf": [OBJECT, OBJECT]}),
    ({"$ref": "#/$defs/a", "$defs": {"a": OBJECT}}, {"$ref": "#/$defs/a", "$defs": {"a": OBJECT}}),
    ({"enum": [{"a": 1}, {}]}, {"enum": [{"a": 1}, {}]}),
], ids=str)  # fmt: skip
def test_what_a_forced_call_s_arguments_may_be(parameters: Any, enforced: dict[str, Any]) -> None:
    (tag,) = json.loads(tool_call_tag([{"function": {"name": "x", "parameters": parameters}}]))["format"][
        "tags"
    ]
    assert tag["content"]["json_schema"] == enforced


@pytest.mark.parametrize("parameters", [
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [OBJECT, {"type": "string"}]},
    {"anyOf": [OBJECT, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}},
    {"enum": ["a", "b"]},
    {"type": "object", "enum": ["a", {}]},
    {"const": 5},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"type": "string"}}}},
    {"type": "string"},
], ids=str)  # fmt: skip
def test_arguments_of_a_forced_call_that_may_be_no_object_are_refused(parameters: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_call_tag([{"function": {"name": "x", "parameters": parameters}}])
    assert caught.value.param == "tools[0].function.parameters"


def test_schemas_inside_structural_tags_are_checked() -> None:
    content = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        normalized_tag({"format": {"type": "sequence", "elements": [content]}})
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        normalized_tag(
            {"structures": [{"begin": "<", "end": ">", "schema": content["json_schema"]}], "triggers": ["<"]}
        )


def spec_of(text: str) -> GrammarSpec:
    return GrammarSpec("grammar", text)


# Following an output


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    made = XGrammarBackend(lambda: Vocabulary(resolve_model("builtin://tiny"), 1024, (EOS,)), 1)
    made.prepare()
    return made


@pytest.fixture(scope="module")
def spelling() -> dict[str, int]:
    """Text -> id of the tokens that are plain ASCII."""
    vocab = json.loads((resolve_model("builtin://tiny") / "tokenizer.json").read_bytes())["model"]["vocab"]
    return {token.replace("Ġ", " ").replace("Ċ", "\n"): token_id for token, token_id in vocab.items()}


def allowed(state: GrammarState) -> set[int]:
    bitmask = np.zeros((3, 32), np.int32)
    state.fill(bitmask, 1)
    assert not bitmask[[0, 2]].any(), "other rows must stay as they are"
    return set(np.flatnonzero(np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")).tolist())


def test_masks_follow_the_output(backend: XGrammarBackend, spelling: dict[str, int]) -> None:
    state = GrammarState(backend.compile(spec_of('root ::= "a" | "ab"')), None, (EOS,))
    a, b = spelling["a"], spelling["b"]
    assert a in allowed(state)
    assert not {b, EOS} & allowed(state)
    assert not state.accept(b)
    assert state.accept(a)
    assert {b, EOS} == allowed(state)
    assert state.accept(b)
    assert allowed(state) == {EOS}
    state.rollback(2)
    assert not {b, EOS} & allowed(state)
    assert state.accept(a)
    assert not state.is_terminated
    assert state.accept(EOS)
    assert state.is_terminated
    assert not state.accept(a)


def test_the_grammar_waits_for_the_end_of_thought(backend: XGrammarBackend, spelling: dict[str, int]) -> None:
    a, b = spelling["a"], spelling["b"]
    grammar = backend.compile(spec_of('root ::= "a"'))
    state = GrammarState(grammar, Reasoning((THINK,), (END_THINK,)), (EOS,))
    assert {a, THINK} <= allowed(state)
    assert not {b, EOS, END_THINK} & allowed(state)
    assert state.accept(THINK)
    assert state.phase is GrammarPhase.REASONING
    assert allowed(state) == set(range(1024)) - {EOS}, "a thought may not end the output"
    assert not state.accept(EOS)
    for token_id in (b, END_THINK):
        assert state.accept(token_id)
    assert state.phase is GrammarPhase.CONTENT
    assert THINK not in allowed(state)
    assert state.accept(a)
    state.rollback(3)
    assert state.phase is GrammarPhase.REASONING
    state.rollback(1)
    assert state.phase is GrammarPhase.START
    assert state.accept(a), "a model may answer without a thought"
    assert allowed(state) == {EOS}


def test_markers_of_several_tokens(backend: XGrammarBackend, spelling: dict[str, int]) -> None:
    a, b, x, y = (spelling[letter] for letter in "abxy")
    state = GrammarState(backend.compile(spec_of('root ::= "a"')), Reasoning((x, y), (b, b)), (EOS,))
    assert {a, x} <= allowed(state)
    assert state.accept(x)
    assert allowed(state) == {y}
    assert state.accept(y)
    for token_id in (b, a, b):
        assert state.accept(token_id)
    assert state.phase is GrammarPhase.REASONING
    assert state.accept(b)
    assert state.phase is GrammarPhase.CONTENT


@pytest.mark.parametrize(
    ("prompt", "is_constrained", "is_open"),
    [
        ("user\nhi\nassistant\n", False, False),
        ("user\nhi\nassistant\n<think>\n", False, True),
        ("user\nhi\nassistant\n<think>\n\n</think>\n\n", True, False),
        ("user\nwhat is <think>?\nassistant\n", False, False),
        ("assistant\n<think>x</think>y\nuser\nhi\nassistant\n", False, False),
    ],
)
def test_the_prompt_says_whether_there_is_room_for_thought(
    prompt: str, is_constrained: bool, is_open: bool
) -> None:
    reasoning = reasoning_after(prompt, "<think>", "</think>", [1], [2])
    assert (reasoning is None) == is_constrained
    assert reasoning is None or reasoning.is_open == is_open


def test_special_tokens_are_no_text(backend: XGrammarBackend, spelling: dict[str, int]) -> None:
    state = GrammarState(backend.compile(GrammarSpec("regex", "[^x]*")), None, (EOS,))
    assert {0, 1} & allowed(state) == set()
    assert THINK in allowed(state), "markers that the detokeniser writes out are text"


def test_bounded_strings_hold_no_control_characters(backend: XGrammarBackend) -> None:
    state = GrammarState(
        backend.compile(GrammarSpec("json", '{"type": "string", "maxLength": 8}')), None, (EOS,)
    )
    info = Vocabulary(resolve_model("builtin://tiny"), 1024, (EOS,)).tokenizer_info()
    texts = info.decoded_vocab
    assert state.accept(texts.index(b'"'))
    tokens = allowed(state)
    assert texts.index(b"a") in tokens
    assert not [texts[token] for token in tokens if any(byte < 0x20 for byte in texts[token])]


def test_an_ambiguous_grammar_uses_up_its_time(
    backend: XGrammarBackend, spelling: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy_engine.structured.grammar_state.CPU_S_BASE", 0.02)
    monkeypatch.setattr("argosy_engine.structured.grammar_state.CPU_S_PER_TOKEN", 0.001)
    state = GrammarState(backend.compile(spec_of('root ::= root root | "a" | ""')), None, (EOS,))
    bitmask = np.zeros((1, 32), np.int32)
    for _ in range(1000):
        state.accept(spelling["a"])
        state.fill(bitmask, 0)
        if state.is_too_slow:
            break
    assert state.is_too_slow


def test_choices_are_taken_literally(backend: XGrammarBackend) -> None:
    from xgrammar import GrammarMatcher

    choices = ('say "hi"\n', "back\\slash", "naïve ☃", "a|b", "[x]", "😀")
    grammar = backend.compile(StructuredOutputsParams(choice=choices).spec())
    for choice in choices:
        matcher = GrammarMatcher(grammar)
        assert matcher.accept_string(choice)
        assert matcher.accept_token(EOS)
    matcher = GrammarMatcher(grammar)
    assert matcher.accept_string("a")
    assert not matcher.accept_token(EOS), "a prefix of a choice is none"


VALID = [
    {"type": "object"},
    {"type": "array"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a"]},
    {
        "$defs": {"N": {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}},
        "$ref": "#/$defs/N",
    },
    {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
        {"type": "object", "properties": {"kind": {"const": "b"}, "x": {"type": "number"}}, "required": ["kind"]},
    ]},
    {"type": "integer", "multipleOf": 7},
    {"type": "array", "prefixItems": [True, {"type": "string", "format": "date"}], "items": False},
    {"type": "object", "patternProperties": {"^x_[a-z]+$": {"type": "boolean"}}},
]  # fmt: skip


def one_of_kinds(*kinds: dict[str, Any]) -> dict[str, Any]:
    """A oneOf of objects that differ in their `kind` only."""
    return {
        "oneOf": [{"type": "object", "properties": {"kind": kind}, "required": ["kind"]} for kind in kinds]
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"const": True}, {"const": 1}),
        ({"const": False}, {"const": 0}),
        ({"const": [True]}, {"const": [1]}),
        ({"const": {"a": True}}, {"const": {"a": 1}}),
        ({"const": 1}, {"const": "1"}),
        ({"const": None}, {"const": False}),
        ({"const": ["object", []]}, {"const": {}}),
        ({"const": 2**53}, {"const": 2**53 + 1}),
        ({"const": 2**61}, {"const": 1}),
        ({"const": 2**63}, {"const": str(2**63)}),
        ({"enum": [1, 1.0]}, {"enum": [2]}),
    ],
)
def test_options_with_unequal_kinds_are_accepted(first: dict[str, Any], second: dict[str, Any]) -> None:
    schema = one_of_kinds(first, second)
    assert json.loads(normalized_schema(schema))["oneOf"] == schema["oneOf"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"const": 1}, {"const": 1.0}),
        ({"const": 0}, {"const": -0.0}),
        ({"const": 2**80}, {"const": 2.0**80}),
        ({"const": 2**53}, {"const": 2.0**53}),
        ({"enum": ["a", 2]}, {"enum": ["b", 2.0]}),
        ({"const": [1, {"a": 2}]}, {"const": [1.0, {"a": 2.0}]}),
        ({"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}),
    ],
)
def test_options_with_equal_kinds_are_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    """JSON Schema compares numbers by their value, however they are written."""
    with pytest.raises(InvalidRequest, match="oneOf whose options may overlap"):
        normalized_schema(one_of_kinds(first, second))


@pytest.mark.parametrize("schema", VALID, ids=[json.dumps(schema)[:50] for schema in VALID])
def test_accepted_schemas_compile(backend: XGrammarBackend, schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    spec = StructuredOutputsParams(json=schema).spec()
    assert backend.compile(spec).memory_size_bytes > 0


_MEMORY_OF_GRAMMARS = """
import ctypes, gc, json, sys
import msgspec
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from argosy_engine.structured.xgrammar_backend import Deserializer, Vocabulary, XGrammarBackend

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

backend = XGrammarBackend(lambda: Vocabulary(resolve_model("builtin://tiny"), 1024, [2]), 1)
deserializer = Deserializer(backend.prepare())
for schemas in json.load(sys.stdin):
    made = []
    for schema in schemas:
        spec = GrammarSpec(kind="json", text=json.dumps(schema))
        made.append(msgspec.msgpack.encode(backend.serialized(spec, backend.compile(spec))))
    deserializer.grammar(made[0])
    before = resident()
    grammars = [deserializer.grammar(each) for each in made]
    print(resident() - before, sum(each.num_bytes for each in grammars))
    del grammars
"""


def test_a_grammar_is_counted_with_what_its_native_part_takes() -> None:
    """XGrammar counts a grammar's masks, and not its automaton; and the length of a schema tells nothing of it."""
    schemas: list[list[dict[str, Any]]] = [
        [object_with(f"name{n}", {"type": "string", "maxLength": 20}) for n in range(40)],
        [object_with(f"name{n}", {"type": "string", "description": "d" * 20_000}) for n in range(40)],
        [{"type": "array", "items": {"type": "integer"}, "maxItems": 500 + n} for n in range(8)],
        [{"type": "integer", "multipleOf": 100 + n} for n in range(4)],
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _MEMORY_OF_GRAMMARS],
        input=json.dumps(schemas),
        capture_output=True,
        text=True,
        check=True,
    )
    for line, each in zip(done.stdout.splitlines(), schemas, strict=True):
        taken, counted = map(int, line.split())
        assert 0 < taken < 1.25 * counted, each[0]
        assert counted < 4 * taken, each[0]


def object_with(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def test_multiples_count_by_their_square() -> None:
    """The automaton of 1,000 remainders took 300 MB and 12 s to compile, and counted as 10,000 of 200,000."""
    assert normalized_schema({"type": "integer", "multipleOf": 400})
    with pytest.raises(InvalidRequest, match="multipleOf without bounds is supported up to 400"):
        normalized_schema({"type": "integer", "multipleOf": 401})
    several = [{"type": "integer", "multipleOf": 350}, {"type": "integer", "multipleOf": 300}]
    with pytest.raises(InvalidRequest, match="the schema is too large"):
        normalized_schema({"type": "array", "prefixItems": several})
    assert normalized_schema({"type": "integer", "multipleOf": 1000, "minimum": 0, "maximum": 9000})
