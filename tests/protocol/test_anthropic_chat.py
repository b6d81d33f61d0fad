"""A Messages request is the chat that its client would have sent to /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_protocol.anthropic import (
    READ_BLOCKS,
    ContentBlock,
    as_chat,
    decode_count_tokens_request,
    decode_messages_request,
    name_field,
)
from argosy_protocol.chunk_hash import prompt_segments
from argosy_protocol.errors import BadRequest, ContextLengthExceeded
from argosy_protocol.openai import ChatCompletionRequest, decode_request
from argosy_protocol.skipped_content import MESSAGES_KINDS, Skipped, num_noted_images
from case_tables import wrong_answers

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
THOUGHT = {"type": "thinking", "thinking": "t", "signature": "s"}


def translated(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "max_tokens": 4096, "messages": [HI], **fields}
    return as_chat(decode_messages_request(json.dumps(body).encode()))


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "max_tokens": 4096, "messages": [HI], **fields}
    decoded = decode_request("chat/completions", json.dumps(body).encode())
    assert isinstance(decoded, ChatCompletionRequest)
    return decoded


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
RESULT_MESSAGE = {"role": "tool", "tool_call_id": "c1", "content": "r"}
F = {"name": "f", "input_schema": SCHEMA}
WEB_SEARCH = {"name": "web_search", "type": "web_search_20250305", "max_uses": 3}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}, "or_note": True}
LINKED = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}
OF_FILE = {"type": "image", "source": {"type": "file", "file_id": "f"}}
NO_IMAGE = "[image that the model does not get]"
NO_DOCUMENT = "[document that the model does not get]"
SEARCHED = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [{"type": "web_search_result", "url": "u", "encrypted_content": "x"}],
    },
]


def resulting(*content: Any) -> list[dict[str, Any]]:
    return [HI, assistant(CALL), user({**RESULT, "content": list(content)})]


def document(**fields: Any) -> dict[str, Any]:
    return {"type": "document", **fields}


MESSAGES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("a text", [user(block("hi"))], [HI]),
    ("two texts", [user(block("a"), block("b"))], [user(block("a"), block("b"))]),
    ("two messages", [HI, {"role": "user", "content": "b"}], [user(block("hi"), block("b"))]),
    (
        "thoughts",
        [HI, assistant(THOUGHT, block("a")), HI],
        [HI, {"role": "assistant", "content": "a", "reasoning": "t"}, HI],
    ),
    (
        "thoughts of others",
        [HI, assistant({"type": "redacted_thinking", "data": "x"}, block("a")), HI],
        [HI, {"role": "assistant", "content": "a"}, HI],
    ),
    (
        "a call",
        [HI, assistant(block("a"), CALL), user(RESULT)],
        [HI, {**CALLING, "content": "a"}, RESULT_MESSAGE],
    ),
    (
        "text beside a result",
        [HI, assistant(CALL), user(block("b"), RESULT)],
        [HI, CALLING, RESULT_MESSAGE, {"role": "user", "content": "b"}],
    ),
    (
        "a result of blocks",
        [HI, assistant(CALL), user({**RESULT, "content": [block("r")]})],
        [HI, CALLING, RESULT_MESSAGE],
    ),
    (
        "a failure",
        [HI, assistant(CALL), user({**RESULT, "is_error": True})],
        [HI, CALLING, {**RESULT_MESSAGE, "content": "Error: r"}],
    ),
    (
        "a result without content",
        [HI, assistant(CALL), user({"type": "tool_result", "tool_use_id": "c1"})],
        [HI, CALLING, {**RESULT_MESSAGE, "content": ""}],
    ),
    ("an image", [user(block("a"), IMAGE)], [user(block("a"), SEEN)]),
    ("an image alone", [user(IMAGE)], [user(SEEN)]),
    (
        "an image by its URL",
        [user(LINKED, block("a"))],
        [user({**SEEN, "image_url": {"url": "https://a.b/c.png"}}, block("a"))],
    ),
    ("an image that is elsewhere", [user(block("a"), OF_FILE)], [user(block("a"), block(NO_IMAGE))]),
    ("an image without a source", [user(block("a"), {"type": "image"})], [user(block("a"), block(NO_IMAGE))]),
    (
        "an error with an image",
        [HI, assistant(CALL), user({**RESULT, "content": [IMAGE], "is_error": True})],
        [HI, CALLING, {**RESULT_MESSAGE, "content": [block("Error"), SEEN]}],
    ),
    (
        "a result with an image",
        resulting(block("r"), IMAGE),
        [HI, CALLING, {**RESULT_MESSAGE, "content": [block("r"), SEEN]}],
    ),
    (
        "a result with tools that a search has found",
        resulting({"type": "tool_reference", "tool_name": "f"}),
        [HI, CALLING, {**RESULT_MESSAGE, "content": "[the tool f can be called now]"}],
    ),
    (
        "a result that is a text document",
        resulting(document(title="t", source={"type": "text", "media_type": "text/plain", "data": "r"})),
        [HI, CALLING, {**RESULT_MESSAGE, "content": "t\nr"}],
    ),
    (
        "a document of blocks, and one that is no text",
        [
            user(
                document(source={"type": "content", "content": [block("a"), IMAGE]}),
                document(title="t", source={"type": "base64", "data": "aaaa"}),
            )
        ],
        [user(block("a"), block(f"t\n{NO_DOCUMENT}"))],
    ),
    (
        "a result that a search has found",
        resulting({"type": "search_result", "title": "t", "source": "http://s", "content": [block("r")]}),
        [HI, CALLING, {**RESULT_MESSAGE, "content": "t: http://s\nr"}],
    ),
    (
        "a result that is nothing we know",
        resulting({"type": "shiny", "text": 5}, "x", {"a": 1}),
        [HI, CALLING, {**RESULT_MESSAGE, "content": ""}],
    ),
    (
        "a result that is no list",
        [HI, assistant(CALL), user({**RESULT, "content": {"a": 1}})],
        [HI, CALLING, {**RESULT_MESSAGE, "content": '{"a": 1}'}],
    ),
    (
        "tools of Anthropic's servers",
        [HI, assistant(block("a"), *SEARCHED, block("b")), HI],
        [HI, assistant(block("a"), block("b")), HI],
    ),
    (
        "nothing but those",
        [HI, assistant(*SEARCHED), user(block("b"), {"type": "container_upload", "file_id": "f"})],
        [HI, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
    ),
    (
        "what a conversation was compacted to",
        [HI, assistant({"type": "compaction", "content": "s"}), HI],
        [HI, {"role": "assistant", "content": "s"}, HI],
    ),
    (
        "blocks whose fields have other types",
        [
            HI,
            assistant({"type": "shiny", "input": [5], "id": {}}, {"type": "y" * 65}),
            user({"type": "z", "text": 1}, block("b")),
        ],
        [HI, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
    ),
    (
        "a system message at the beginning",
        [{"role": "system", "content": "s"}, HI],
        [{"role": "system", "content": "s"}, HI],
    ),
    (
        "a system message between others",
        [HI, assistant(block("a")), {"role": "system", "content": "s"}, HI],
        [HI, {"role": "assistant", "content": "a"}, user(block("s"), block("hi"))],
    ),
    (
        "a system message after a result",
        [HI, assistant(CALL), user(RESULT), {"role": "system", "content": "s"}],
        [HI, CALLING, {**RESULT_MESSAGE, "content": [block("r"), block("s")]}],
    ),
]


@pytest.mark.parametrize(
    ("given", "expected"), [case[1:] for case in MESSAGES], ids=[case[0] for case in MESSAGES]
)
def test_messages(given: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert translated(messages=given) == chat(messages=expected)


@pytest.mark.parametrize(
    "system", ["s", [block("s")], [block("x-anthropic-billing-header: cch=1"), block("s")]]
)
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    assert translated(system=system) == chat(messages=[{"role": "system", "content": "s"}, HI])


def test_a_final_assistant_message_is_continued() -> None:
    begun = {"role": "assistant", "content": "It is"}
    expected = chat(messages=[HI, begun], continue_final_message=True, add_generation_prompt=False)
    assert translated(messages=[HI, begun]) == expected
    for blocks in ([], [block("x-anthropic-billing-header: a")]):  # nothing was said
        assert translated(messages=[HI, begun, {"role": "system", "content": blocks}]) == expected


def test_thoughts_before_the_text_that_is_continued() -> None:
    begun = {"role": "assistant", "content": "It is", "reasoning": "t"}
    expected = chat(messages=[HI, begun], continue_final_message=True, add_generation_prompt=False)
    assert translated(messages=[HI, assistant(THOUGHT, block("It is"))]) == expected


def test_tools() -> None:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    function = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    assert translated(tools=[tool]) == chat(tools=[function])
    assert translated(tools=[]) == chat()
    untyped = translated(tools=[{"type": "custom", "name": "f", "input_schema": {}, "strict": True}])
    assert untyped.tools is not None
    assert untyped.tools[0]["function"] == {"name": "f", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    tool = {"name": "f", "input_schema": SCHEMA}
    function = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    assert translated(tools=[tool], tool_choice=choice) == chat(tools=[function], **expected)


def test_sampling_fields() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stream": True, "cache_salt": "x", "priority": 3}
    assert translated(**given, stop_sequences=["a", "b"], metadata={"user_id": "u"}) == chat(
        **given, stop=["a", "b"], user="u"
    )


@pytest.mark.parametrize(
    ("thinking", "variable", "is_shown"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, True),
        ({"type": "adaptive"}, True, True),
        ({"type": "adaptive", "display": "omitted"}, True, False),
        ({"type": "disabled"}, False, False),
    ],
)
def test_thinking_sets_the_variables_of_templates(
    thinking: dict[str, Any], variable: bool, is_shown: bool
) -> None:
    made = translated(thinking=thinking)
    assert made.thinking_token_budget == thinking.get("budget_tokens")
    assert made.chat_template_kwargs == {"enable_thinking": variable, "thinking": variable}
    assert made.include_reasoning is is_shown
    assert translated(thinking=thinking, chat_template_kwargs={"thinking": 5}).chat_template_kwargs == {
        "enable_thinking": variable,
        "thinking": 5,
    }


def test_output_config() -> None:
    made = translated(output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}})
    assert made.reasoning_effort == "low"
    assert made.response_format is not None
    assert made.response_format["json_schema"]["schema"] == SCHEMA


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [user()]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": "s"}]}, "messages"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [user(CALL)]}, "messages[0].content[0]"),
    ({"messages": [HI, assistant(RESULT)]}, "messages[1].content[0]"),
    ({"messages": [HI, assistant({**CALL, "id": None}), user(RESULT)]}, "messages[1].content[0].id"),
    ({"messages": [HI, assistant(CALL)]}, "messages"),
    ({"messages": [HI, assistant(THOUGHT)]}, "messages[1].content[0]"),
    ({"messages": [HI, assistant(block("a"), THOUGHT)]}, "messages[1].content[1]"),
    ({"messages": [HI, assistant({"type": "redacted_thinking", "data": "x"})]}, "messages[1].content[0]"),
    ({"messages": [user({"type": "tool_result", "content": "x"})]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [user({**RESULT, "content": [block("x")] * 1025})]}, "messages[0].content[0].content"),
    ({"messages": [{"role": "system", "content": [{"type": "image"}]}, HI]}, "messages[0].content[0]"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"messages": [user({"type": "server_tool_use"})]}, "messages"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [F, WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "thinking.budget_tokens"),
    ({"stop_sequences": ["a", " "]}, "stop_sequences[1]"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
]


@pytest.mark.parametrize(
    "given",
    [{"edits": []}, {"edits": [{"type": "clear_tool_uses_20250919"}], "x": 1}, {"edits": {}}, ["x"], None],
)
def test_whatever_a_context_is_to_lose_the_model_reads_all_of_it(given: Any) -> None:
    assert translated(context_management=given) == translated()


def refusal(fields: dict[str, Any]) -> tuple[str | None, str]:
    """Return the `param` and the message with which a request is refused."""
    try:
        return "accepted", repr(translated(**fields))
    except BadRequest as error:
        return error.param, error.message


def test_what_no_chat_can_say_is_refused_by_name() -> None:
    told = [(fields, param, refusal(fields)) for fields, param in REFUSED]
    assert wrong_answers((fields, wanted, param) for fields, wanted, (param, _) in told) == {}
    assert [(param, message) for _, param, (_, message) in told if not message.startswith(param)] == []


@pytest.mark.parametrize("many", [user(*[RESULT] * 1024), assistant(*[CALL] * 1024)])
def test_blocks_of_all_messages_are_bounded(many: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="more than 65536 content blocks in all"):
        translated(messages=[HI, {"role": "assistant", "content": "x"}, *[many] * 65])


@pytest.mark.parametrize(
    ("param", "message", "expected"),
    [
        ("stop", "stop takes at most 16 stop strings", "stop_sequences takes at most 16 stop strings"),
        ("messages[3].role", "messages[3].role: dropped", "messages: dropped"),
        ("response_format.json_schema", "response_format needs x", "output_config.format needs x"),
        ("response_format", "json: not allowed", "output_config.format: json: not allowed"),
        (
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: not allowed",
            "output_config.format: not allowed",
        ),
        ("max_tokens", "max_tokens must be", "max_tokens must be"),
        ("thinking_token_budget", "thinking_token_budget is x", "thinking.budget_tokens is x"),
        ("tools[3].function.name", "tools[3].function.name must be x", "tools[3].name must be x"),
        ("tools[3].function.parameters", "function.parameters must be x", "tools[3].input_schema must be x"),
        ("tools[3].function.parameters", "$ref: no", "tools[3].input_schema: $ref: no"),
        ("tools[3].function", "tools[3].function must be x", "tools[3] must be x"),
    ],
)
def test_errors_about_the_chat_name_fields_of_the_messages_request(
    param: str, message: str, expected: str
) -> None:
    assert name_field(BadRequest(message, param=param)).message == expected


def test_a_prompt_that_is_too_long_is_called_so() -> None:
    error = name_field(ContextLengthExceeded("the maximum is 4 tokens", param="prompt"))
    assert error.message == "prompt is too long: the maximum is 4 tokens"


def test_what_is_skipped_is_counted_by_a_few_kinds() -> None:
    skipped = Skipped(MESSAGES_KINDS)
    tools = [F, WEB_SEARCH, {"type": "tool_search_tool_regex_20251119", "name": "s"}, {"type": "mcp_toolset"}]
    body = {
        "model": "m",
        "messages": [
            HI,
            assistant(*SEARCHED, {"type": "x"}),
            *resulting(IMAGE, OF_FILE, document(), {"type": "y"}, 5),
        ],
        "tools": [*tools, {"type": "new_20300101", "name": "n"}],
        "tool_choice": {"type": "auto"},
    }
    chat = as_chat(decode_count_tokens_request(json.dumps(body).encode()), skipped)
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["f"]
    assert skipped.content == {
        "server_tool_use": 1, "web_search_tool_result": 1, "image": 1, "document": 1, "other": 3,
    }  # fmt: skip
    assert skipped.dropped_tools == "mcp_toolset, other, tool_search_tool_regex, web_search"
    assert num_noted_images(chat.messages) == 1


def test_blocks_that_cannot_be_read_are_bounded() -> None:
    strange, part = {"type": "x", "text": 5}, {"type": 5}
    many = [assistant(*[strange] * 1000) for _ in range(4)]
    assert translated(messages=[HI, *many, HI]).messages[1].content == ""
    with pytest.raises(BadRequest, match="text"):
        translated(messages=[HI, *many, *many, HI])
    skipped = Skipped(MESSAGES_KINDS)
    results = [user(*[{**RESULT, "content": [part] * 900}] * 8), HI]
    body = {"model": "m", "max_tokens": 5, "messages": [HI, assistant(CALL), *results]}
    as_chat(decode_messages_request(json.dumps(body).encode()), skipped)
    assert skipped.content == {"other": 7200}


def test_a_choice_of_any_tool_is_no_choice_where_none_is_left() -> None:
    assert translated(tools=[WEB_SEARCH], tool_choice={"type": "auto"}) == translated()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
UNREAD = st.text(min_size=1, max_size=70).filter(lambda kind: kind not in READ_BLOCKS)
FIELD_NAMES = [field.name for field in msgspec.structs.fields(ContentBlock) if field.name != "type"]


@given(UNREAD, st.dictionaries(st.sampled_from(FIELD_NAMES), JSON), JSON)
def test_no_block_that_is_not_known_is_refused(kind: str, fields: dict[str, Any], result: Any) -> None:
    strange = {**fields, "type": kind}
    results = [result, strange] if isinstance(result, list) else [strange, result]
    messages = [HI, assistant(strange, CALL), *resulting(*results)[2:], user(strange, block("b"))]
    made = translated(messages=messages)
    assert [message.role for message in made.messages] == ["user", "assistant", "tool", "user"]
    prompt_segments(made)


TEXTS = st.text(max_size=8)
ARGUMENTS = st.dictionaries(st.text(max_size=4), st.integers() | TEXTS | st.lists(st.booleans()), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same conversation for the Messages API and for chats."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    pending: list[str] = []
    for turn in range(draw(st.integers(1, 3))):
        results = [(call, draw(TEXTS)) for call in pending]
        text = draw(TEXTS)
        is_list = draw(st.booleans()) or bool(results)
        ours.append(
            user(*({"type": "tool_result", "tool_use_id": c, "content": r} for c, r in results), block(text))
            if is_list
            else {"role": "user", "content": text}
        )
        theirs += [{"role": "tool", "tool_call_id": c, "content": r} for c, r in results]
        theirs.append({"role": "user", "content": text})
        thought, said = draw(st.none() | st.text(min_size=1, max_size=5)), draw(st.none() | TEXTS)
        calls = [(f"call-{turn}-{n}", draw(ARGUMENTS)) for n in range(draw(st.integers(0, 2)))]
        if said is None and not calls:
            said = "ok"
        pending = [call for call, _ in calls]
        ours.append(
            assistant(
                *([{"type": "thinking", "thinking": thought, "signature": ""}] if thought else ()),
                *([block(said)] if said is not None else ()),
                *({"type": "tool_use", "id": c, "name": "f", "input": arguments} for c, arguments in calls),
            )
        )
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if thought:
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = [
                {
                    "id": c,
                    "type": "function",
                    "function": {"name": "f", "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for c, arguments in calls
            ]
        theirs.append(message)
    return [*ours, HI], [*theirs, HI]


@given(conversations(), st.none() | TEXTS)
def test_a_conversation_is_hashed_as_the_same_chat(
    conversation: tuple[list[dict[str, Any]], list[dict[str, Any]]], system: str | None
) -> None:
    ours, theirs = conversation
    # `HI` follows an answer, perhaps one with calls whose results never came: translation does not judge that.
    if system is not None:
        theirs = [{"role": "system", "content": system}, *theirs]
    expected = chat(messages=theirs)
    made = translated(messages=ours, system=system)
    assert made == expected
    assert prompt_segments(made) == prompt_segments(expected)
    body = json.dumps({"model": "m", "messages": ours, "system": system}).encode()
    assert as_chat(decode_count_tokens_request(body)).messages == expected.messages
