"""Structural tags: XGrammar's descriptions of free text with structured parts, and the tag that enforces tool calls.

XGrammar checks the form of a tag when it compiles it; this module checks its JSON schemas like any other schema, and
bounds its size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.grammar_checks import (
    NO_REPETITION,
    ONE_ITEM,
    RepetitionSize,
    check_grammar_size,
    check_notation,
    check_regex,
    grammar_size,
    least_json_size,
    repeated,
    sum_sizes,
)
from argosy_engine.structured.json_schema import (
    CheckBudget,
    checked_object_schema,
    checked_schema,
    relaxed_object_schema,
)

MAX_WHITESPACE = 32
"""Limit on consecutive white space between the parts of a JSON value. It is enough to indent eight levels; without a
limit, a confused model may write newlines until `max_tokens`."""
MAX_DEPTH = 64
MAX_TAG_BYTES = 512 * 1024
"""Limit of a client's tag with its schemas normalized."""
MAX_TOOLS_BYTES = 128 * 1024
"""Limit of the tag of all tools that may be called. The largest real tool catalogues are a third of it."""
_FUNCTION_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
"""OpenAI's rule, with the dots of MCP servers. Other names could hold marks of a model's calls."""


class ToolCallForm(NamedTuple):
    """The text of tool calls that `tool_choice` requires.

    `begin` stands before a call's arguments and `end` after them. In them `{name}` stands for the function's name and
    `{json_name}` for the name as JSON string. `NUMBER` in `begin` stands for digits.
    """

    begin: str
    end: str
    style: Literal["json", "qwen_xml", "glm_xml", "minimax_xml", "deepseek_xml", "gemma"] = "json"
    """How the arguments are written: as XGrammar's `style` of a JSON schema."""
    separator: str = ""
    first: str = ""
    """Text before the first call."""
    last: str = ""
    """Text after the last call."""
    is_single: bool = False
    """Whether an output has one call at most."""


NUMBER = "{number}"
HERMES_CALLS = ToolCallForm(
    begin='<tool_call>\n{"name": {json_name}, "arguments": ', end="}\n</tool_call>", separator="\n"
)


def normalized_tag(tag: Any) -> str:
    """Return the tag as JSON text, with its schemas checked and normalized.

    Accepts the current form (`{"format": ...}`) and the older one that vLLM's clients send
    (`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`).

    Raises:
        InvalidRequest: the tag has neither form, is nested too deeply or too large, or has a schema that cannot be
            enforced.
    """
    if not isinstance(tag, dict):
        raise InvalidRequest("a structural tag is an object")
    if "structures" in tag:
        tag = {"format": _from_older_form(tag)}
    if not isinstance(tag.get("format"), dict):
        raise InvalidRequest("a structural tag needs a format")
    normalized = _normalized(tag["format"], 0, CheckBudget())
    check_grammar_size(_size(normalized))
    return _encoded(normalized, MAX_TAG_BYTES)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check what every tool needs, whether tool calls are enforced or not.

    Raises:
        InvalidRequest: a tool is no function, has no name that models can call, or a field of it has the wrong type.
    """
    for index, tool in enumerate(tools):
        where, function = f"tools[{index}]", tool.get("function")
        if tool.get("type", "function") != "function":
            kind = str(tool["type"])[:64]
            raise InvalidRequest(f"{where}.type must be 'function', not {kind!r}", f"{where}.type")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where} needs function, an object with function.name", where)
        where, name = f"{where}.function", function.get("name")
        if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
            given = repr(name[:80]) if isinstance(name, str) else type(name).__name__
            raise InvalidRequest(
                f"{where}.name must be 1 to 64 letters (a-z, A-Z), digits, '_', '-' or '.', not {given}",
                f"{where}.name",
            )
        if not isinstance(function.get("description"), str | None):
            raise InvalidRequest(f"{where}.description must be a text", f"{where}.description")
        if not isinstance(function.get("parameters"), dict | None):
            raise InvalidRequest(
                f"{where}.parameters must be a JSON schema of an object", f"{where}.parameters"
            )
        if not isinstance(function.get("strict"), bool | None):
            raise InvalidRequest(f"{where}.strict must be true or false", f"{where}.strict")


def tool_call_tag(
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    parallel: bool = True,
    form: ToolCallForm = HERMES_CALLS,
    relaxed: set[str] | None = None,
) -> str:
    """Make the structural tag of tool calls, for Hermes `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    Args:
        tools: tool definitions of the OpenAI API; `parameters` is a JSON schema.
        name: if given, only this function may be called, and only once.
        parallel: whether there may be several calls.
        form: how the model writes calls.
        relaxed: gets the keywords that cannot be enforced and are dropped from tools whose `strict` is not true.

    Raises:
        InvalidRequest: a tool has no name, a malformed schema, or a strict one that cannot be enforced, `name` is not
            among the tools, or the tag is too large.
    """
    tags = []
    budget, size = CheckBudget(), 0
    relaxed = set() if relaxed is None else relaxed
    check_tools(tools)
    for index, tool in enumerate(tools):
        function = tool["function"]
        if name is None or function["name"] == name:
            # Before the schema is copied: one alone may have a million values.
            size += least_json_size([function["name"], function.get("parameters")], MAX_TOOLS_BYTES - size)
            if size > MAX_TOOLS_BYTES:
                raise _too_large(MAX_TOOLS_BYTES)
            tags.append(
                _call_tag(
                    function["name"],
                    function.get("parameters"),
                    f"tools[{index}]",
                    budget,
                    form,
                    None if function.get("strict") else relaxed,
                )
            )
    if not tags:
        raise InvalidRequest(
            f"tool_choice names {str(name)[:128]!r}, which is not among the tools", "tool_choice"
        )
    is_single = name is not None or not parallel or form.is_single
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    if form.first or form.last:
        calls = _tag(form.first, calls, form.last)
    return _encoded(calls, MAX_TOOLS_BYTES)


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OTHER_FORMS = frozenset(("$ref", "const", "enum", "anyOf", "oneOf", "allOf"))
"""Keywords by which a schema says what its values are without a type."""
_OTHER_NAMES = _OTHER_FORMS.union(
    (
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "if",
        "then",
        "else",
        "dependentSchemas",
        "dependentRequired",
        "dependencies",
    )
)
"""Keywords with which an object without declared properties may have some."""


def _call_tag(
    name: str,
    parameters: Any,
    where: str,
    budget: CheckBudget,
    form: ToolCallForm,
    relaxed: set[str] | None,
) -> dict[str, Any]:
    """Args: relaxed: gets the keywords that are dropped; None refuses them."""
    schema = parameters or _NO_PARAMETERS
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequest(
            "function.parameters must be a JSON schema of an object", f"{where}.function.parameters"
        )
    if schema.get("properties") is not None or schema.keys().isdisjoint(_OTHER_FORMS):
        schema = {"type": "object", **schema}
    if schema.get("properties") == {} and schema.keys().isdisjoint(_OTHER_NAMES):
        schema = {**schema, "additionalProperties": False}
    try:
        if relaxed is None:
            checked = checked_object_schema(schema, budget)
        else:
            checked, keywords = relaxed_object_schema(schema, budget)
            relaxed |= keywords
    except InvalidRequest as error:
        raise InvalidRequest(str(error), f"{where}.function.parameters") from None
    begin, number, after_number = _named(form.begin, name).partition(NUMBER)
    content = _schema_format(checked, form.style)
    if number:
        digits = {"type": "regex", "pattern": "[0-9]{1,9}"}
        after = {"type": "const_string", "value": after_number}
        content = {"type": "sequence", "elements": [digits, after, content]}
    return _tag(begin, content, _named(form.end, name))


def _named(text: str, name: str) -> str:
    return text.replace("{json_name}", json.dumps(name, ensure_ascii=False)).replace("{name}", name)


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _from_older_form(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidRequest("structures and triggers must be lists")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict) or not all(key in structure for key in ("begin", "end")):
            raise InvalidRequest("each of structures needs begin, schema and end")
        content = {"type": "json_schema", "json_schema": structure.get("schema") or {}}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _normalized(value: Any, depth: int, budget: CheckBudget) -> Any:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_normalized(item, depth + 1, budget) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in ("json_schema", "qwen_xml_parameter") and "json_schema" in value:
        return {
            **value,
            **_schema_format(checked_schema(value["json_schema"], budget)),
            "type": value["type"],
        }
    return {key: _normalized(item, depth + 1, budget) for key, item in value.items()}


def _size(value: Any) -> RepetitionSize:
    """Compute the size of the regular expressions, grammars and repetitions in a tag; JSON schemas have other limits.

    Raises:
        InvalidRequest: one of them alone is too large.
    """
    if isinstance(value, list):
        return sum_sizes(_size(item) for item in value)
    if not isinstance(value, dict):
        return NO_REPETITION
    match value:
        case {"type": "json_schema" | "qwen_xml_parameter"}:
            return ONE_ITEM
        case {"type": "regex", "pattern": str(pattern)}:
            return check_regex(pattern)
        case {"type": "grammar", "grammar": str(grammar)}:
            check_notation(grammar)
            check_grammar_size(size := grammar_size(grammar))
            return size
    size = sum_sizes(_size(item) for item in value.values())
    match value:
        case {"type": "star" | "plus"}:
            return repeated(size, 1, is_open=True)
        case {"type": "repeat", "min": int(low), "max": int(high)}:
            return repeated(size, max(low, high), is_open=high < 0)
        case {"type": "any_text", "max_chars": int(limit)}:
            return repeated(ONE_ITEM, limit, is_open=False)
        case {"type": "const_string" | "any_text" | "token" | "exclude_token" | "any_tokens"}:
            return ONE_ITEM
    return size


def _schema_format(schema: Any, style: str = "json") -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}
    return form if style == "json" else {**form, "style": style}


def _encoded(form: dict[str, Any], limit: int) -> str:
    text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("contains lone surrogates, which are not text") from None
    if size > limit:
        raise _too_large(limit)
    return text


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"tools and schemas together exceed {limit} bytes")
