"""Schemas of tools whose calls are required: what cannot be enforced is dropped, the rest is enforced."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import assume, given, settings
from xgrammar import GrammarMatcher

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.structural_tag import tool_call_tag
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from argosy_engine.structured.xgrammar_backend import Vocabulary, XGrammarBackend


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    made = XGrammarBackend(lambda: Vocabulary(resolve_model("builtin://tiny"), 1024, (2,)), 1)
    made.prepare()
    return made


def tag_of(parameters: Any, *, strict: bool | None = None) -> tuple[str, set[str]]:
    relaxed: set[str] = set()
    tool = {"function": {"name": "x", "parameters": parameters, "strict": strict}}
    return tool_call_tag([tool], name="x", relaxed=relaxed), relaxed


def accepts(backend: XGrammarBackend, tag: str, arguments: Any) -> bool:
    matcher = GrammarMatcher(
        backend.compile(GrammarSpec("structural_tag", tag)), terminate_without_stop_token=True
    )
    text = '<tool_call>\n{"name": "x", "arguments": ' + json.dumps(arguments) + "}\n</tool_call>"
    return matcher.accept_string(text) and matcher.is_terminated()


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
A, B = {"a": {"type": "string"}}, {"b": {"type": "string"}}
CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    # keyword that is dropped, schema, what meets it, what the grammar must still refuse
    ("maxLength", of(a={"type": "string", "pattern": "^x+$", "maxLength": 3}), [{"a": "xx"}], [{"a": "y"}]),
    ("format", of(a={"type": "string", "format": "iban"}), [{"a": "DE1"}], [{"a": 1}]),
    ("format", of(a={"type": "string", "format": "iban", "maxLength": 2}), [{"a": "DE"}], [{"a": "DE1"}]),
    ("format", of(a={"type": "string", "format": "date", "pattern": "^[0-9-]+$"}),
     [{"a": "2026-11-29"}], [{"a": "x"}]),
    ("pattern", of(a={"type": "string", "pattern": "^(?=x).*$", "maxLength": 3}), [{"a": "xy"}], [{"a": "xxxx"}]),
    ("if", {**of(a=TEXT, b=NUMBER), "if": {"required": ["a"]}, "then": {"required": ["b"]}},
     [{"a": "", "b": 1}, {"b": 1}], [{"a": 1}, {"c": 1}]),
    ("then", {**of(a=TEXT), "if": {"required": ["a"]}, "then": {"properties": {"c": {}}, "required": ["c"]}},
     [{"a": "", "c": [1]}], [{"a": 1}]),
    ("then", {**of(a=of(b=TEXT)), "if": {}, "then": of(a=of(c=NUMBER))}, [{"a": {"b": "", "c": 1}}], [{"a": {"b": 1}}]),
    ("else", {**of(a=TEXT), "additionalProperties": False, "if": {"required": ["a"]}, "else": of(c=TEXT)},
     [{"a": ""}, {}], [{"c": ""}]),
    ("not", {**of(a=TEXT, b=TEXT), "not": {"required": ["a", "b"]}}, [{"a": ""}, {"b": ""}], [{"a": 1}, {"c": ""}]),
    ("uniqueItems", of(a={"type": "array", "items": TEXT, "uniqueItems": True}), [{"a": ["x", "y"]}], [{"a": [1]}]),
    ("contains", of(a={"type": "array", "items": TEXT, "contains": {"const": "x"}}), [{"a": ["x"]}], [{"a": [1]}]),
    ("multipleOf", of(a={"type": "number", "multipleOf": 0.5, "minimum": 0}), [{"a": 1.5}], [{"a": -1}]),
    ("dependentRequired", {**of(a=TEXT, b=TEXT), "dependentRequired": {"a": ["b"]}},
     [{"a": "", "b": ""}], [{"a": 1}]),
    ("dependentSchemas", {**of(a=TEXT), "dependentSchemas": {"a": of(c=TEXT)}}, [{"a": "", "c": ""}], [{"a": 1}]),
    ("patternProperties", {**of(a=TEXT), "patternProperties": {"^x": NUMBER}, "additionalProperties": False},
     [{"a": "", "xy": 1}], [{"a": 1}]),
    ("propertyNames", {**of(a=TEXT), "propertyNames": {"maxLength": 1}}, [{"a": ""}], [{"a": 1}, {"b": ""}]),
    ("anyOf", {**of(a=TEXT, b=TEXT), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": ""}, {"b": ""}], [{"a": 1}, {"c": ""}]),
    ("anyOf", {**of(a=TEXT), "anyOf": [of(b=TEXT), of(c=NUMBER)]}, [{"a": "", "c": 1}], [{"a": 1}]),
    ("oneOf", of(a={"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}]}),
     [{"a": "x"}, {"a": "xyz"}], [{"a": 1}]),
    ("allOf", of(a={"allOf": [{"type": "string", "maxLength": 2}, {"minLength": 1}]}, b=TEXT),
     [{"a": "x"}], [{"b": 1}]),
    ("allOf", {"allOf": [{"$ref": "#/$defs/a"}, of(b=TEXT)], "$defs": {"a": of(a=TEXT)}},
     [{"a": "", "b": ""}], [[], 1]),
    ("properties", of(a={"$ref": "#/$defs/a", "properties": B}) | {"$defs": {"a": of(**A)}},
     [{"a": {"a": "", "b": ""}}], [{"a": {"a": 1}}]),
    ("patternProperties", of(a={"$ref": "#/$defs/a", "patternProperties": {"^b": TEXT}}) | {"$defs": {"a": of(**A)}},
     [{"a": {"a": "", "b": ""}}], [{"a": {"a": 1}}]),
    ("unevaluatedProperties", of(a={"$ref": "#/$defs/a", "unevaluatedProperties": False}) | {"$defs": {"a": of(**A)}},
     [{"a": {"a": ""}}], [{"a": {"a": 1}}]),
    ("$ref", {**of(a={"$ref": "https://example.org/a"}, b=TEXT)}, [{"a": [1]}, {"b": ""}], [{"b": 1}]),
    ("$id", of(a={"$id": "https://example.org/a", **of(c=TEXT)}, b=TEXT), [{"a": {"c": ""}}], [{"b": 1}]),
    ("maxLength", of(a={"maxLength": 3}, b=TEXT), [{"a": 5}, {"a": "x"}], [{"b": 1}]),
    ("type", of(a={"type": "string", "enum": ["x", None]}), [{"a": "x"}], [{"a": "y"}]),
    ("items", of(a={"type": "array", "items": [TEXT]}, b=TEXT), [{"a": ["", 1]}], [{"b": 1}, {"a": 1}]),
    ("false", of(a=False, b=TEXT), [{"b": ""}], [{"b": 1}]),
    ("contains", of(a={"type": "array", "items": of(b=TEXT), "contains": of(c=TEXT)}),
     [{"a": [{"b": "", "c": ""}]}], [{"a": [{"b": 1}]}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("keyword", "schema", "good", "bad"),
    CASES,
    ids=[f"{index} {case[0]}" for index, case in enumerate(CASES)],
)
def test_what_cannot_be_enforced_is_dropped_and_the_rest_is_enforced(
    backend: XGrammarBackend, keyword: str, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    tag, relaxed = tag_of(schema)
    assert keyword in relaxed
    for arguments in good:
        if keyword not in ("$ref", "items"):  # those are remote, or of an older draft
            jsonschema.Draft202012Validator(schema).validate(arguments)
        assert accepts(backend, tag, arguments), arguments
    for arguments in bad:
        assert not accepts(backend, tag, arguments), arguments
    with pytest.raises(InvalidRequest, match=r"\(at [$#]") as caught:
        tag_of(schema, strict=True)
    assert caught.value.param == "tools[0].function.parameters"


PARTS: list[dict[str, Any]] = [
    {"if": {"required": ["a"]}, "then": {"required": ["c"]}}, {"not": {"required": ["b"]}},
    {"anyOf": [{"required": ["a"]}, {"properties": {"c": NUMBER}}]}, {"oneOf": [{"required": ["a"]}, {}]},
    {"allOf": [{"properties": {"c": TEXT}}, {"maxProperties": 2}]}, {"allOf": [of(c=TEXT), of(d=NUMBER)]},
    {"patternProperties": {"^[cd]": NUMBER}}, {"dependentSchemas": {"a": {"properties": {"a": of(c=TEXT)}}}},
    {"required": ["c"]}, {"propertyNames": {"maxLength": 1}}, {"minProperties": 1}, {"$ref": "#/$defs/a"},
]  # fmt: skip
LEAVES: list[Any] = [
    TEXT, NUMBER, {"type": "string", "pattern": "x", "maxLength": 1}, {"enum": ["x", 1]}, {}, of(**B),
    {"$ref": "#/$defs/a"}, {"type": ["object", "string"], "properties": {"a": TEXT}, "not": {"const": "x"}},
]  # fmt: skip
VALUES = st.recursive(
    st.sampled_from(["", "x", 1, None]),
    lambda inner: st.lists(
        st.tuples(st.sampled_from("abcd"), inner), max_size=3, unique_by=lambda p: p[0]
    ).map(lambda pairs: dict(sorted(pairs))),
    max_leaves=4,
).filter(lambda value: isinstance(value, dict))


def test_objects_of_all_of_are_merged(backend: XGrammarBackend) -> None:
    tag, relaxed = tag_of({"allOf": [{**of(a=TEXT), "required": ["a"]}, of(b=NUMBER)]})
    assert not relaxed
    for arguments, is_accepted in (
        ({"a": "", "b": 1}, True),
        ({"a": ""}, True),
        ({"b": 1}, False),
        ({"a": 1}, False),
    ):
        assert accepts(backend, tag, arguments) is is_accepted


def test_a_bad_schema_leaves_the_other_tools_as_they_are() -> None:
    bad = {"name": "bad", "parameters": {"type": "object", "not": {}}}
    tools = [{"function": bad}, {"function": {"name": "good", "strict": True, "parameters": of(a=TEXT)}}]
    relaxed: set[str] = set()
    first, second = json.loads(tool_call_tag(tools, relaxed=relaxed))["format"]["tags"]
    assert relaxed == {"not"}
    assert first["content"]["json_schema"] == {"type": "object", "additionalProperties": True}
    assert second["content"]["json_schema"] == of(a=TEXT)


@pytest.mark.parametrize("schema", [
    of(a={"type": "text"}), of(a={"type": "string", "minLength": -1}), of(a=7), of(a={"enum": []}),
    {"type": "object", "required": "a"}, of(a={"anyOf": []}),
], ids=str)  # fmt: skip
def test_a_malformed_schema_is_refused_in_any_tool(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"\(at \$"):
        tag_of(schema)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose objects have no properties that nothing names, as in our grammars."""
    leaves = {name: of(**A) if "$ref" in leaf else leaf for name, leaf in schema["properties"].items()}
    leaves = {
        name: {**leaf, "unevaluatedProperties": False} if "properties" in leaf else leaf
        for name, leaf in leaves.items()
    }
    return {**schema, "properties": leaves, "unevaluatedProperties": False}


@given(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(LEAVES) for name in "ab"}),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3),
    st.lists(VALUES, min_size=1, max_size=6),
)
@settings(deadline=None, max_examples=150)
def test_a_relaxed_grammar_accepts_what_the_schema_accepts(
    backend: XGrammarBackend, properties: dict[str, Any], parts: list[dict[str, Any]], values: list[Any]
) -> None:
    schema: dict[str, Any] = {"type": "object", "$defs": {"a": of(**A)}}
    for part in ({"properties": properties}, *parts):
        schema |= part
    valid = [value for value in values if jsonschema.Draft202012Validator(closed(schema)).is_valid(value)]
    assume(valid)
    tag, _ = tag_of(schema)
    for value in valid:
        assert accepts(backend, tag, value), (schema, value)
