"""Chat templates: what they accept, their variables, and their sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2 import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.template_sandbox import BoundedEnvironment
from argosy_protocol.openai import ChatCompletionRequest, ChatMessage
from argosy_protocol.skipped_content import skipped_parts
from chat_requests import chat


def test_a_template_that_fails_is_a_bad_request() -> None:
    for source in ("{{ range(10 ** 9) | list }}", "{{ messages[0].name.a.b }}", "{{ 1 // 0 }}"):
        with pytest.raises(InvalidRequest, match="cannot render"):
            ChatTemplate(source, {}).render(chat(messages=[{"role": "user", "content": "Hi"}]))


def test_template_takes_text_parts_and_refuses_others(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "red"}, {"type": "text", "text": "door"}]
    assert "user\nred\ndoor<|im_end|>" in template.render(chat(messages=[{"role": "user", "content": parts}]))
    image = [{"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}]
    with pytest.raises(InvalidRequest, match="image_url"):
        template.render(chat(messages=[{"role": "user", "content": image}]))


IMAGE_PART = {"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}
HI = {"role": "user", "content": "hi"}
REPLAYED: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "a refusal",
        [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HI],
        [HI, {"role": "assistant", "content": "No."}, HI],
    ),
    (
        "an answer of OpenAI's SDK that is a refusal",
        [
            HI,
            {"role": "assistant", "content": None, "refusal": "No.", "function_call": None, "audio": None},
            HI,
        ],
        [HI, {"role": "assistant", "content": "No."}, HI],
    ),
    (
        "an image that was answered",
        [{"role": "user", "content": [IMAGE_PART]}, {"role": "assistant", "content": "A cat."}, HI],
        [
            {"role": "user", "content": "[image that the model does not get]"},
            {"role": "assistant", "content": "A cat."},
            HI,
        ],
    ),
    (
        "an image that a tool has returned",
        [HI, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}, IMAGE_PART]}],
        [HI, {"role": "tool", "tool_call_id": "c", "content": "a\n[image that the model does not get]"}],
    ),
    (
        "parts of other servers",
        [HI, {"role": "assistant", "content": [{"type": "thinking"}, {"a": 1}, {"type": []}]}, HI],
        [HI, {"role": "assistant", "content": ""}, HI],
    ),
    (
        "a call of a custom tool",
        [
            HI,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "exec", "input": "ls"}}],
            },
        ],
        [
            HI,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "exec", "arguments": '{"input": "ls"}'},
                    }
                ],
            },
        ],
    ),
]


@pytest.mark.parametrize(("given", "same"), [row[1:] for row in REPLAYED], ids=[row[0] for row in REPLAYED])
def test_history_is_rendered_without_what_the_model_does_not_read(
    template: ChatTemplate, given: list[dict[str, Any]], same: list[dict[str, Any]]
) -> None:
    assert template.render(chat(messages=given)) == template.render(chat(messages=same))


def test_parts_that_are_left_out_are_counted_by_a_few_kinds() -> None:
    messages = [message for _, given, _ in REPLAYED for message in given]
    newest = {"role": "user", "content": [IMAGE_PART]}
    assert skipped_parts(chat(messages=[*messages, newest]).messages).content == {"image_url": 2, "other": 3}


def test_template_variables_are_those_it_declares(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "hi"}]
    off = template.render(chat(messages=messages, chat_template_kwargs={"enable_thinking": False}))
    assert off.endswith("<think>\n\n</think>\n\n")
    plain = template.render(chat(messages=messages))
    for name in ("chat_template", "tokenize", "messages", "unknown"):
        assert template.render(chat(messages=messages, chat_template_kwargs={name: "x"})) == plain


def test_reasoning_effort_none_turns_thinking_off(template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "hi"}]

    def ends_thinking(**fields: object) -> bool:
        return template.render(chat(messages=messages, **fields)).endswith("</think>\n\n")

    assert ends_thinking(reasoning_effort="none")
    assert not ends_thinking(reasoning_effort="low")
    assert not ends_thinking(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})


def test_template_sandbox_holds(tmp_path: Path) -> None:
    hostile = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest):
        hostile.render(ChatCompletionRequest(messages=[ChatMessage(role="user", content="x")]))


def test_tool_call_arguments_reach_the_template_as_values(template: ChatTemplate) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    text = template.render(
        chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}])
    )
    assert '"arguments": {"a": 1}' in text


FIRST_ARGUMENTS = "{% set a = messages[0].tool_calls[0].function.arguments %}"


@pytest.mark.parametrize(
    "arguments", ['{"path": "a.py", "text": "imp', "{broken", "[1]", '"x"', '{"a":' * 200 + "1" + "}" * 200]
)
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a | tojson }}", "%s"),
        ("{{ a }}", "%s"),
        ("{{ '<' + a + '>' }}", "<%s>"),
        ("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}", "%s"),
        ("{% for name, value in a.items() %}{{ name }}{% endfor %}", ""),
        ("{{ messages[0].tool_calls[0].function | tojson }}", '{"name": "f", "arguments": {}}'),
    ],
)
def test_arguments_that_are_no_object_are_their_text_or_empty(
    arguments: str, source: str, expected: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    request = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    expected = expected.replace("%s", arguments)
    assert ChatTemplate(FIRST_ARGUMENTS + source, {}).render(request) == expected


PREFIXES = [
    "The door is",
    "The door is ",
    "e",
    "",
    "  spaced",
    "two\nlines\n",
    "<|im_end|>",
    "<|im_",
    "\U0010efff x",
]


def continued(content: str, **fields: object) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": content}]
    return chat(messages=messages, continue_final_message=True, add_generation_prompt=False, **fields)


@pytest.mark.parametrize("content", PREFIXES)
def test_a_final_message_is_continued_where_it_ends(template: ChatTemplate, content: str) -> None:
    assert template.render(continued(content)).endswith("</think>\n\n" + content)


@pytest.mark.parametrize("content", ["The door is", "The door is ", " The door is  "])
def test_a_template_that_trims_a_message_trims_the_one_to_be_continued(content: str) -> None:
    trimming = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]\n{% endfor %}", {})
    assert trimming.render(continued(content)) == "[Which?]\n[The door is"


def test_text_parts_are_continued_after_the_last(template: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "red"}, {"type": "text", "text": "door"}]
    messages = [{"role": "assistant", "content": parts}]
    request = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert template.render(request).endswith("red\ndoor")


def test_what_cannot_be_continued_is_refused(template: ChatTemplate) -> None:
    dropping = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequest, match="does not render the final message") as refusal:
        dropping.render(continued("The door is"))
    assert refusal.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="set `add_generation_prompt` to False") as refusal:
        template.render(chat(messages=[{"role": "user", "content": "x"}], continue_final_message=True))
    assert refusal.value.param == "continue_final_message"


def test_a_text_part_without_a_text_is_refused_by_name(template: ChatTemplate) -> None:
    for part in ({"type": "text"}, {"type": "text", "text": 5}):
        with pytest.raises(InvalidRequest, match="must be a text") as refused:
            template.render(chat(messages=[{"role": "user", "content": [part]}]))
        assert refused.value.param == "messages[0].content[0].text"


def test_the_tag_for_trainers_has_no_effect() -> None:
    source = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{% set end = '.' %}"
        "{{ message.content + end }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
        "{{ end is defined }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = ChatTemplate(source, {})
    assert template.render(chat(messages=messages)) == "ab.False"


TOOL = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("templates", "plain", "with_tools"),
    [
        (
            {"default": "{{ messages[0].content }}\n", "tool_use": "{{ tools[0].function.name }}:\n"},
            "Hi",
            "f:",
        ),
        (
            {"default": "{{ messages[0].content }}{{ tools }}", "rag": "{{ documents }}"},
            "HiNone",
            f"Hi{TOOL}",
        ),
        ({"tool_use": "{{ messages[0].content }}{{ tools }}!"}, "HiNone!", f"Hi{TOOL}!"),
    ],
)
def test_a_model_may_have_a_template_for_tools(
    templates: dict[str, str], plain: str, with_tools: str, tmp_path: Path
) -> None:
    named = [{"name": name, "template": source} for name, source in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(chat(messages=messages)) == plain
    assert template.render(chat(messages=messages, tools=TOOL)) == with_tools


@pytest.mark.parametrize(("arguments", "written"), [
    ("", '{"b": "é", "a": [1, {"d": 2, "c": null}]}'),
    ("separators=(',', ':')", '{"b":"é","a":[1,{"d":2,"c":null}]}'),
    ("sort_keys=True", '{"a": [1, {"c": null, "d": 2}], "b": "é"}'),
    ("True, None, [', ', ':'], True", '{"a":[1, {"c":null, "d":2}], "b":"\\u00e9"}'),
])  # fmt: skip
@pytest.mark.parametrize("is_of_request", [False, True])
def test_json_in_templates_is_written_as_transformers_does(
    arguments: str, written: str, is_of_request: bool
) -> None:
    source = "{{ {'b': 'é', 'a': [1, {'d': 2, 'c': none}]} | tojson(" + arguments + ") }}"
    template = ChatTemplate(source, {}, is_of_request=is_of_request)
    assert template.render(chat(messages=[HI])) == written


def test_an_option_of_json_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unexpected keyword argument 'seperators'"):
        ChatTemplate("{{ [1, 2] | tojson(seperators=(',', ':')) }}", {}).render(chat(messages=[HI]))


def _failure(value: Undefined) -> tuple[type[Exception], str]:
    with pytest.raises(jinja2.TemplateError) as raised:
        value + 1
    return type(raised.value), str(raised.value)


def test_fields_are_read_as_the_sandbox_reads_them() -> None:
    ours, jinjas = BoundedEnvironment(), ImmutableSandboxedEnvironment()

    class Fields(dict[str, object]):
        own = 1

    values = [
        {"role": "user", "items": 1, "__class__": 2, "_x": 3},
        Fields(role="user", own=2),
        {},
        "text",
        [1],
        None,
    ]
    names = [
        "role",
        "content",
        "items",
        "update",
        "pop",
        "__class__",
        "_x",
        "own",
        "__len__",
        "upper",
        "append",
        "0",
    ]
    for value in values:
        for name in names:
            one, other = ours.getattr(value, name), jinjas.getattr(value, name)
            assert type(one) is type(other)
            if isinstance(other, Undefined):
                assert _failure(one) == _failure(other)
            else:
                assert one == other


LLAVA = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'][0]['text'] }}{% else %}\
{{ message['role'].upper() }}: {% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\
{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}\
{% endif %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""


def test_a_template_that_renders_parts_only_gets_parts(tmp_path: Path) -> None:
    """As of LLaVA and SmolVLM, which would leave out texts."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    parts = [{"type": "text", "text": "red"}, {"type": "text", "text": "door"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        HI,
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": parts},
    ]
    assert (
        template.render(chat(messages=messages))
        == "Be brief. USER: hi ASSISTANT: No. USER: red\ndoor ASSISTANT:"
    )
    continued = chat(
        messages=[HI, {"role": "assistant", "content": "It is"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert template.render(continued) == "USER: hi ASSISTANT: It is"
    with pytest.raises(InvalidRequest, match="image_url"):
        template.render(chat(messages=[{"role": "user", "content": [IMAGE_PART]}]))


def test_the_template_of_the_tokenizer_counts_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[0].content }}"})
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(chat(messages=[HI])) == "hi"
