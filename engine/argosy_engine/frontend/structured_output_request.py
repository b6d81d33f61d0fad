"""Structured output of an API request: translates response_format, structured_outputs and tool_choice.

Each becomes a `StructuredOutputsParams`. A required tool call wins over `response_format`, as in vLLM; a request with
another two of them is rejected.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.structural_tag import (
    HERMES_CALLS,
    ToolCallForm,
    check_tools,
    tool_call_tag,
)
from argosy_engine.structured.structured_outputs_params import KINDS, StructuredOutputsParams
from argosy_protocol.json_limits import message_and_field
from argosy_protocol.openai import ChatCompletionRequest, GenerationRequest

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's former names. vLLM ignores them now; they are rejected here, because the output would be unconstrained."""
SCHEMA_FIELD = "response_format.json_schema.schema"
MAX_GRAMMAR_TEXT_OF_A_CALL = 16 << 20
"""Characters of a grammar times sequences of a call. Each sequence is a message of its own to the core. The largest
grammar of one kind is 1.3 million characters; the largest schemas of real tool catalogues fit 300 times."""


def structured_outputs(
    request: GenerationRequest, num_sequences: int = 1, tool_calls: ToolCallForm = HERMES_CALLS
) -> StructuredOutputsParams | None:
    """Return the structured output that the request asks for, or None.

    Args:
        num_sequences: sequences of the call, each of which has this output.
        tool_calls: how the model writes calls.

    Raises:
        InvalidRequest: malformed, too large for so many sequences, more than one structured output, or a tool choice
            without such a tool.
    """
    for name, kind in _GUIDED.items():
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} is not supported: use structured_outputs.{kind}", name)
    asked = {
        "response_format": _of_response_format(request.response_format),
        "structured_outputs": _of_field(request.structured_outputs),
        "tool_choice": _of_tool_choice(request, tool_calls)
        if isinstance(request, ChatCompletionRequest)
        else None,
    }
    if asked["tool_choice"] is not None:
        asked["response_format"] = None  # it is about the text of an answer, and a required call has none
    given = {name: params for name, params in asked.items() if params is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise InvalidRequest(f"{names} cannot be combined", next(reversed(given)))
    for name, params in given.items():
        try:
            spec = params.spec()
        except InvalidRequest as error:
            if name == "structured_outputs":
                raise
            where = format_field(request) if name == "response_format" else name
            raise InvalidRequest(_named(str(error), where), where) from None
        if len(spec.text) * num_sequences > MAX_GRAMMAR_TEXT_OF_A_CALL:
            raise InvalidRequest(
                f"a grammar of {len(spec.text)} characters for each of {num_sequences} sequences exceeds "
                f"{MAX_GRAMMAR_TEXT_OF_A_CALL} in all; send fewer prompts or choices at once",
                name,
            )
        return params
    return None


def format_field(request: GenerationRequest) -> str:
    """Return the field of a request's `response_format` that has what is compiled."""
    kind = (request.response_format or {}).get("type")
    return SCHEMA_FIELD if kind == "json_schema" else "response_format"


def _named(message: str, where: str) -> str:
    """Return a message of `StructuredOutputsParams` with the client's field in place of the kind of grammar."""
    kind, colon, rest = message.partition(": ")
    return f"{where}: {rest}" if colon and kind in KINDS else message


def _of_field(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    try:
        return msgspec.convert(value, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        message, field = message_and_field(error)
        raise InvalidRequest(
            message, f"structured_outputs.{field}" if field else "structured_outputs"
        ) from None


def _of_response_format(value: dict[str, Any] | None) -> StructuredOutputsParams | None:
    match ({"type": "text"} if value is None else value).get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            assert value is not None
            schema = value.get("json_schema")
            if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
                raise InvalidRequest(
                    "response_format needs json_schema.schema, an object", "response_format.json_schema"
                )
            if not isinstance(name := schema.get("name"), str) or not name:
                raise InvalidRequest(
                    "response_format.json_schema.name must be a text that is not empty",
                    "response_format.json_schema.name",
                )
            return StructuredOutputsParams(json=schema["schema"])
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=value)
        case kind:
            raise InvalidRequest(
                "response_format.type must be text, json_object, json_schema or structural_tag, "
                f"not {str(kind)[:64]!r}",
                "response_format.type",
            )


def _of_tool_choice(request: ChatCompletionRequest, calls: ToolCallForm) -> StructuredOutputsParams | None:
    """Return the grammar of the calls that a tool choice requires; `auto` and `none` require none."""
    choice = request.tool_choice
    check_tools(request.tools or ())
    if choice in (None, "auto", "none"):
        return None
    name = None
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise InvalidRequest(
            "tool_choice must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}", "tool_choice"
        )  # fmt: skip
    if not request.tools:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    parallel = request.parallel_tool_calls is not False
    relaxed: set[str] = set()
    tag = tool_call_tag(request.tools, name=name, parallel=parallel, form=calls, relaxed=relaxed)
    return StructuredOutputsParams.of_checked_tag(tag, relaxed)
