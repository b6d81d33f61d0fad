"""A Responses request is the chat that its client would have sent to /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_protocol.chunk_hash import prompt_segments
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import ChatCompletionRequest, decode_request
from argosy_protocol.responses import READ_ITEMS, ResponseItem, decode_responses_request
from argosy_protocol.responses_chat import name_responses_field, responses_as_chat, translated_response
from argosy_protocol.skipped_content import num_noted_images
from case_tables import wrong_answers

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CHAT_TOOL = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
OTHER = {"type": "function", "name": "g"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c1", "name": "exec", "input": 'say "hi"'}
SHELL = {"type": "exec", "command": ["ls"], "env": {}}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aaaa"}
SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}, "or_note": True}
THOUGHT = {
    "type": "reasoning",
    "id": "rs",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "t"}],
}


def translated(**fields: Any) -> ChatCompletionRequest:
    return responses_as_chat(
        decode_responses_request(json.dumps({"model": "m", "input": "hi", **fields}).encode())
    )


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [HI], **fields}
    decoded = decode_request("chat/completions", json.dumps(body).encode())
    assert isinstance(decoded, ChatCompletionRequest)
    return decoded


def said(text: str, **fields: Any) -> dict[str, Any]:
    """An output message, as answers have it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    } | fields


def texts(*parts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} for part in parts]


def called(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


PARTS = [{"type": "input_text", "text": "hi"}]
ANSWERED = {"role": "assistant", "content": "a"}
ITEMS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("a message", [HI], [HI]),
    ("one part", [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [HI]),
    (
        "two parts",
        [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
        [{"role": "user", "content": texts("a", "b")}],
    ),
    ("no parts", [{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    (
        "an image",
        [{"role": "user", "content": [{"type": "input_image", "image_url": "u", "detail": "low"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}]}],
    ),
    ("an answer", [HI, said("a"), HI], [HI, {"role": "assistant", "content": "a"}, HI]),
    (
        "a refusal",
        [HI, said("", content=[{"type": "refusal", "refusal": "no"}]), HI],
        [HI, {"role": "assistant", "content": "no"}, HI],
    ),
    (
        "a thought",
        [HI, THOUGHT, said("a"), HI],
        [HI, {"role": "assistant", "content": "a", "reasoning": "t"}, HI],
    ),
    (
        "a summary of a thought",
        [HI, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, said("a"), HI],
        [HI, {"role": "assistant", "content": "a", "reasoning": "s"}, HI],
    ),
    (
        "an empty thought",
        [HI, {"type": "reasoning", "summary": []}, said("a")],
        [HI, {"role": "assistant", "content": "a"}],
    ),
    (
        "a call",
        [HI, CALL, OUTPUT],
        [HI, {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, RESULT],
    ),
    (
        "a whole turn",
        [HI, THOUGHT, said("a"), CALL, OUTPUT],
        [HI, {"role": "assistant", "content": "a", "reasoning": "t", "tool_calls": [CHAT_CALL]}, RESULT],
    ),
    (
        "a thought and a call",
        [HI, THOUGHT, CALL, OUTPUT],
        [HI, {"role": "assistant", "content": None, "reasoning": "t", "tool_calls": [CHAT_CALL]}, RESULT],
    ),
    (
        "two calls at once",
        [HI, CALL, {**CALL, "call_id": "c2"}, OUTPUT, {**OUTPUT, "call_id": "c2"}],
        [
            HI,
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}]},
            RESULT,
            {**RESULT, "tool_call_id": "c2"},
        ],
    ),
    (
        "two calls one after the other",
        [HI, CALL, OUTPUT, THOUGHT, CALL, OUTPUT],
        [
            HI,
            {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
            RESULT,
            {"role": "assistant", "content": None, "reasoning": "t", "tool_calls": [CHAT_CALL]},
            RESULT,
        ],
    ),
    (
        "a thought after an answer begins a turn",
        [HI, said("a"), THOUGHT, said("b"), HI],
        [
            HI,
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning": "t"},
            HI,
        ],
    ),
    (
        "an output in parts",
        [HI, CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "r"}]}],
        [HI, {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, RESULT],
    ),
    (
        "a custom tool's call",
        [HI, CUSTOM_CALL, {"type": "custom_tool_call_output", "call_id": "c1", "output": "r"}],
        [HI, called("exec", '{"input": "say \\"hi\\""}'), RESULT],
    ),
    (
        "an output of a custom tool in parts",
        [
            HI,
            CUSTOM_CALL,
            {
                "type": "custom_tool_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_text", "text": "a"},
                    IMAGE,
                    {"type": "shiny"},
                    {"text": "no type"},
                    5,
                ],
            },
        ],
        [HI, called("exec", '{"input": "say \\"hi\\""}'), {**RESULT, "content": [*texts("a"), SEEN]}],
    ),
    (
        "a call in a namespace",
        [HI, {**CALL, "namespace": "mcp__git__"}, OUTPUT],
        [HI, called("mcp__git__f", '{"a": 1}'), RESULT],
    ),
    (
        "a local shell",
        [
            HI,
            {"type": "local_shell_call", "id": "l", "call_id": "c1", "status": "completed", "action": SHELL},
            {"type": "local_shell_call_output", "id": "c1", "output": "r"},
        ],
        [HI, called("local_shell", json.dumps(SHELL)), RESULT],
    ),
    (
        "a search for tools",
        [
            HI,
            {
                "type": "tool_search_call",
                "call_id": "c1",
                "execution": "client",
                "status": "completed",
                "arguments": {"query": "git"},
            },
            {
                "type": "tool_search_output",
                "call_id": "c1",
                "execution": "client",
                "status": "completed",
                "tools": [],
            },
        ],
        [HI, called("tool_search", '{"query": "git"}'), {**RESULT, "content": "Found no tools."}],
    ),
    (
        "a message of another agent",
        [HI, {"type": "agent_message", "author": "/a", "recipient": "/root", "content": PARTS}],
        [HI, {"role": "user", "content": "Message from /a to /root:\nhi"}],
    ),
    (
        "an output without an id, one that is no text, and none",
        [HI, {**OUTPUT, "call_id": None}, {**OUTPUT, "output": {"a": 1}}, {**OUTPUT, "output": None}],
        [
            HI,
            {"role": "tool", "content": "r"},
            {**RESULT, "content": '{"a": 1}'},
            {**RESULT, "content": ""},
        ],
    ),
    (
        "an image that was answered",
        [{"role": "user", "content": [*PARTS, IMAGE, {"type": "shiny"}]}, said("a"), HI],
        [{"role": "user", "content": [*texts("hi"), SEEN]}, {"role": "assistant", "content": "a"}, HI],
    ),
    (
        "an image that the user has given up",
        [{"role": "user", "content": [IMAGE]}, HI],
        [{"role": "user", "content": [SEEN]}, HI],
    ),
    *[
        (f"of another server: {kind}", [HI, {"type": kind, "id": "x"}, said("a"), HI], [HI, ANSWERED, HI])
        for kind in (
            *("web_search_call", "compaction", "context_compaction", "mcp_call", "image_generation_call"),
            *("additional_tools", "agent_message", "compaction_trigger", "local_shell_call", "never_seen"),
        )
    ],
    (
        "reasoning that another server has encrypted",
        [HI, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, said("a"), HI],
        [HI, ANSWERED, HI],
    ),
    ("a developer", [{"role": "developer", "content": "d"}, HI], [{"role": "developer", "content": "d"}, HI]),
    (
        "two system messages",
        [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, HI],
        [{"role": "system", "content": texts("s", "d")}, HI],
    ),
    (
        "a later system message",
        [HI, {"role": "system", "content": "s"}],
        [HI, {"role": "system", "content": "s"}],
    ),
]


@pytest.mark.parametrize(("items", "messages"), [row[1:] for row in ITEMS], ids=[row[0] for row in ITEMS])
def test_items_become_messages(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    assert translated(input=items).messages == chat(messages=messages).messages


def test_instructions_come_first() -> None:
    system = {"role": "system", "content": "Be kind."}
    assert translated(instructions="Be kind.") == chat(messages=[system, HI])
    both = translated(instructions="Be kind.", input=[{"role": "developer", "content": "d"}, HI])
    assert both == chat(messages=[{"role": "system", "content": texts("Be kind.", "d")}, HI])


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_output_tokens": 5}, {"max_tokens": 5}),
    ({"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7}, {}),
    ({"stop": "x", "stop_token_ids": [1], "ignore_eos": True, "logit_bias": {"1": 2.0}}, {}),
    ({"frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.5}, {}),
    ({"user": "u", "prompt_cache_key": "k", "session_id": "s", "cache_salt": "c", "priority": 3}, {}),
    ({"chat_template_kwargs": {"a": 1}, "vllm_xargs": {"b": 2}, "include_reasoning": False}, {}),
    ({"structured_outputs": {"regex": "a"}}, {}),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    ({"truncation": "auto"}, {"truncate_prompt_tokens": -1}),
    ({"top_logprobs": 3}, {}),
    (
        {"top_logprobs": 3, "include": ["message.output_text.logprobs"]},
        {"logprobs": True, "top_logprobs": 3},
    ),
    ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
    ({"text": {"format": {"type": "text"}}}, {}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    ({"tools": []}, {}),
    ({"tools": [TOOL]}, {"tools": [CHAT_TOOL], "parallel_tool_calls": True}),
    ({"tools": [TOOL], "parallel_tool_calls": False}, {"tools": [CHAT_TOOL], "parallel_tool_calls": False}),
    (
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": True},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
        {
            "tools": [CHAT_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": True,
        },
    ),
    (
        {
            "tools": [TOOL, OTHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}],
            },
        },
        {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": True},
    ),
    ({"metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "s", "max_tool_calls": 3}, {}),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS)
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    same = set(fields) & set(ChatCompletionRequest.__struct_fields__)
    given = {} if expected else {name: fields[name] for name in same - {"tools", "metadata", "top_logprobs"}}
    assert translated(**fields) == chat(**given, **expected)


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_an_unfinished_answer_is_continued(status: str) -> None:
    made = translated(input=[HI, said("a", status=status)])
    assert (made.continue_final_message, made.add_generation_prompt) == (True, False)
    assert not translated(input=[HI, said("a")]).continue_final_message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [HI, {"role": "user", "content": [{"type": "input_file"}]}]}, "input[1].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [HI, {"id": "msg_1"}]}, "input[1].id"),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
    ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input"),
    ({"input": [HI, {"type": "compaction_trigger"}]}, "input[1].type"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{**CUSTOM_CALL, "input": None}]}, "input[0].input"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0]"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "h"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
]


def refusal(fields: dict[str, Any]) -> tuple[str | None, str]:
    """Return the `param` and the message with which a request is refused."""
    try:
        return "accepted", repr(translated(**fields))
    except BadRequest as error:
        return error.param, error.message


def test_what_models_cannot_read_is_refused() -> None:
    told = [(fields, param, refusal(fields)) for fields, param in REFUSED]
    assert wrong_answers((fields, wanted, param) for fields, wanted, (param, _) in told) == {}
    assert [
        (param, message)
        for _, param, (_, message) in told
        if param.removesuffix(".id").removesuffix(".type") not in message
    ] == []


@pytest.mark.parametrize(
    ("param", "message", "asked", "expected"),
    [
        ("max_tokens", "max_tokens must be", "max_output_tokens", "max_output_tokens must be"),
        ("prompt", "prompt has", "input", "input has"),
        ("messages[3].role", "messages[3].role: dropped", "input", "input: dropped"),
        ("tools[1].function.name", "tools[1].function.name is", "tools[1].name", "tools[1].name is"),
        ("response_format.json_schema.schema", "no", "text.format.schema", "no"),
        (
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: no",
            "text.format.schema",
            "text.format.schema: no",
        ),
        ("response_format", "response_format: no", "text.format", "text.format: no"),
        ("temperature", "temperature must be", "temperature", "temperature must be"),
    ],
)
def test_errors_about_the_chat_name_fields_of_the_responses_request(
    param: str, message: str, asked: str, expected: str
) -> None:
    error = name_responses_field(BadRequest(message, param=param))
    assert (error.param, error.message) == (asked, expected)


def test_what_is_skipped_is_counted_by_a_few_kinds() -> None:
    items = [
        *[
            {"type": kind, "id": "x"}
            for kind in ("web_search_call", "web_search_call", "compaction", "y", "z")
        ],
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {**OUTPUT, "output": [IMAGE, {"type": "shiny"}]},
        HI,
    ]
    body = json.dumps({"model": "m", "input": items, "tools": [{"type": "web_search"}, {"type": "q"}]})
    made = translated_response(decode_responses_request(body.encode()))
    skipped = made.skipped
    assert skipped.content == {"web_search_call": 2, "compaction": 1, "other": 3, "reasoning": 1}
    assert num_noted_images(made.chat.messages) == 1
    assert skipped.tools == {"web_search": 1, "other": 1}
    assert skipped.dropped_tools == "other, web_search"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
UNREAD = st.text(min_size=1, max_size=70).filter(lambda kind: kind not in READ_ITEMS)
FIELD_NAMES = [field.name for field in msgspec.structs.fields(ResponseItem) if field.name != "type"]


@given(st.lists(st.tuples(UNREAD, st.dictionaries(st.sampled_from(FIELD_NAMES), JSON)), max_size=3))
def test_no_item_of_another_server_is_refused(strange: list[tuple[str, dict[str, Any]]]) -> None:
    items = [{**fields, "type": kind} for kind, fields in strange]
    made = translated(input=[HI, *items, HI])
    assert [message.content for message in made.messages] == ["hi", "hi"]


OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


@given(st.sampled_from(OUTPUTS), JSON)
def test_no_output_of_a_tool_is_refused(kind: str, output: Any) -> None:
    made = translated(input=[HI, {"type": kind, "call_id": "c", "id": "i", "output": output}])
    assert [message.role for message in made.messages] == ["user", "tool"]
    prompt_segments(made)


TEXTS = st.text(max_size=8)


@given(
    kind=st.sampled_from(["message", "reasoning", "agent_message"]),
    part=st.sampled_from(
        [
            {"type": "new", "text": {"value": 1}},
            {"type": "new", "file_id": 5},
            {"type": "n" * 70, "text": "t"},
            {"type": "", "text": "t"},
            {"type": "output_image", "image_url": {"url": "u"}},
        ]
    ),
)
def test_no_part_of_another_server_is_refused(kind: str, part: dict[str, Any]) -> None:
    item = {"type": kind, "id": "x_1", "role": "assistant", "content": [part, {"type": "text", "text": "t"}]}
    request = decode_responses_request(json.dumps({"model": "m", "input": [HI, item, HI]}).encode())
    assert isinstance(request.input[1], ResponseItem)
    assert request.input[1].id == "x_1"
    made = responses_as_chat(request).messages[1]
    assert "t" in (made.reasoning, *str(made.content).splitlines())


def test_what_is_wrong_with_a_text_of_the_history_is_told() -> None:
    item = {"role": "assistant", "content": [{"type": "new", "text": {}}, {"type": "text", "text": 5}]}
    assert refusal({"input": [item, HI]})[0] == "input[0].content[1].text"


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same conversation for the Responses API and for chats."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for turn in range(draw(st.integers(1, 3))):
        text = draw(TEXTS)
        parts = [{"type": "input_text", "text": text}]
        ours.append({"role": "user", "content": draw(st.sampled_from([text, parts]))})
        theirs.append({"role": "user", "content": text})
        thought, answer = draw(st.none() | st.text(min_size=1, max_size=5)), draw(st.none() | TEXTS)
        calls = [(f"call-{turn}-{n}", draw(TEXTS)) for n in range(draw(st.integers(0, 2)))]
        if answer is None and not calls:
            answer = "ok"
        if thought:
            ours.append({**THOUGHT, "content": [{"type": "reasoning_text", "text": thought}]})
        if answer is not None:
            ours.append(draw(st.sampled_from([said(answer), {"role": "assistant", "content": answer}])))
        ours += [{**CALL, "call_id": name, "arguments": arguments} for name, arguments in calls]
        message: dict[str, Any] = {"role": "assistant", "content": answer or (None if calls else "")}
        if thought:
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}
                for name, arguments in calls
            ]
        theirs.append(message)
        results = [(name, draw(TEXTS)) for name, _ in calls]
        ours += [
            {"type": "function_call_output", "call_id": name, "output": result} for name, result in results
        ]
        theirs += [{"role": "tool", "tool_call_id": name, "content": result} for name, result in results]
    return [*ours, HI], [*theirs, HI]


@given(conversations(), st.none() | st.text(min_size=1, max_size=8))
def test_a_conversation_is_hashed_as_the_same_chat(
    conversation: tuple[list[dict[str, Any]], list[dict[str, Any]]], instructions: str | None
) -> None:
    ours, theirs = conversation
    if instructions is not None:
        theirs = [{"role": "system", "content": instructions}, *theirs]
    expected = chat(messages=theirs)
    made = translated(input=ours, instructions=instructions)
    assert made == expected
    assert prompt_segments(made) == prompt_segments(expected)
