"""Values of arguments that a model writes as plain text."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from argosy_engine.parsers.chat_parser import ChatParser
from argosy_engine.parsers.parser_registry import TOOL_PARSERS
from argosy_engine.parsers.tool_parsers.xml_tool_parsers import ParameterTypes
from argosy_engine.structured.structural_tag import tool_call_tag


class CountingSchema(dict[str, Any]):
    """A schema that counts how often its values are listed, and how often references pass it."""

    reads = passed = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += key == "enum"
        self.passed += key == "a"
        return super().get(key, default)


@pytest.mark.parametrize(
    ("family", "argument"),
    [
        ("qwen3_coder", "<parameter=a>1</parameter>"),
        ("glm45", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ],
)
def test_a_schema_is_read_once_however_many_arguments_there_are(family: str, argument: str) -> None:
    schema = CountingSchema(enum=[1, "b"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    parser = ChatParser(tool_parser=TOOL_PARSERS[family](tools))
    begin, end = ("<function=f>", "</function>") if family == "qwen3_coder" else ("f", "")
    text = f"<tool_call>{begin}{argument * 50}{end}</tool_call>"
    calls = parser.feed(text * 3, is_last=True).calls
    assert [call.arguments for call in calls] == ['{"a": 1}'] * 3
    assert schema.reads == 1


MODEL = {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"]}
LIMITED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Model": MODEL, "Kind": {"enum": ["1", "null", "b c"]}},
    "properties": {
        "listed": {"type": "string", "enum": ["1", "2"]},
        "null_word": {"type": ["string", "null"], "enum": ["null", "NULL"]},
        "mixed": {"enum": ["7", 8, None, True]},
        "five": {"const": 5},
        "yes": {"const": True},
        "list": {"const": [1]},
        "model": {"$ref": "#/$defs/Model"},
        "perhaps_model": {"anyOf": [{"$ref": "#/$defs/Model"}, {"type": "null"}]},
        "kind": {"allOf": [{"$ref": "#/$defs/Kind"}]},
        "untyped_model": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "untyped_list": {"items": {"const": 1}},
        "word": {"type": "string", "pattern": "ab+"},
    },
}
LIMITED["required"] = list(LIMITED["properties"])


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45"])
def test_values_of_a_required_call_satisfy_the_schema(family: str) -> None:
    import xgrammar

    tools = [{"type": "function", "function": {"name": "f", "parameters": LIMITED}}]
    texts = [*map(chr, range(32, 127)), "\n", ""]
    end = len(texts) - 1
    info = xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=[end])
    tag = tool_call_tag(tools, name="f", form=TOOL_PARSERS[family].call_form)
    grammar = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(tag)
    bitmask = xgrammar.allocate_token_bitmask(1, len(texts))
    for seed in range(3):
        random, matcher, output = Random(seed), xgrammar.GrammarMatcher(grammar), ""
        while True:
            matcher.fill_next_token_bitmask(bitmask, 0)
            allowed = [n for n in range(len(texts)) if int(bitmask[0, n // 32]) >> n % 32 & 1]
            if end in allowed:
                break
            closing = [token for token in allowed if texts[token] in "]}<"]
            token = random.choice(closing if closing and random.random() < 0.3 else allowed)
            assert matcher.accept_token(token)
            output += texts[token]
        (found,) = ChatParser(tool_parser=TOOL_PARSERS[family](tools)).feed(output, is_last=True).calls
        jsonschema.validate(json.loads(found.arguments), LIMITED)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string", "maxLength": 3}, "  abc ", "abc"),
        ({"type": "string", "maxLength": 9}, " abc ", " abc "),
        ({"type": "string"}, " abc ", " abc "),
        ({"enum": [" a ", "b"]}, "   a  ", " a "),
        ({"enum": ["a ", "a"]}, " a ", "a"),
        ({}, "[1]", [1]),
        ({}, "1", "1"),
        (True, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/nowhere"}, "1", "1"),
        ({"$ref": "#/properties/p"}, "1", "1"),
    ],
)
def test_text_of_an_argument(schema: Any, text: str, expected: Any) -> None:
    parameters = {"type": "object", "properties": {"p": schema}}
    for described in (
        parameters,
        {"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": parameters}},
        {"additionalProperties": schema},
    ):
        types = ParameterTypes([{"type": "function", "function": {"name": "f", "parameters": described}}])
        assert types.value("f", "p", text) == expected


def test_references_do_not_multiply_the_work() -> None:
    values = CountingSchema(enum=["x"] * 50_000)
    names = [f"p{number}" for number in range(100)]
    parameters = {
        "$defs": {"V": values},
        "properties": {name: {"anyOf": [{"$ref": "#/$defs/V"}, {"type": "integer"}]} for name in names},
    }
    types = ParameterTypes([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert types.value("f", "p0", " x ") == "x"
    assert [types.value("f", name, "y") for name in names] == ["y"] * 100
    assert values.reads < 10


def test_long_references_count_with_their_length() -> None:
    nested = CountingSchema()
    nested["a"] = nested
    references = [{"$ref": "#/x" + "/a" * 500} for _ in range(1000)]
    parameters = {"x": nested, "properties": {"p": {"type": "integer", "anyOf": references}}}
    types = ParameterTypes([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert types.value("f", "p", "1") == 1
    assert nested.passed < 250_000
