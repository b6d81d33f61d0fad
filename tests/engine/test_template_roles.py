"""Roles of messages that a chat template knows, and those that it would drop."""

from __future__ import annotations

import pytest

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.chat_template import ChatTemplate
from chat_requests import chat

USER = {"role": "user", "content": "Hi"}
ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOL_RESULT = {"role": "tool", "content": "42", "tool_call_id": "c"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
IF_TOOLS = """{{ tools }}{{ documents }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}
{% elif m.role == 'tool' and tools %}({{ m.content }}){% endif %}{% endfor %}"""
IF_DOCUMENTS = IF_TOOLS.replace("and tools", "and documents")
IF_ASKED = IF_TOOLS.replace("and tools", "and shows_results is defined and shows_results")
NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}
{% elif m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"""


def test_developer_becomes_system_where_a_template_does_not_know_it(template: ChatTemplate) -> None:
    told = {"role": "developer", "content": "Answer in verse"}
    for messages in ([told, USER], [USER, told]):
        text = template.render(chat(messages=messages))
        assert "<|im_start|>system\nAnswer in verse<|im_end|>" in text


def test_function_becomes_tool_where_a_template_does_not_know_it(template: ChatTemplate) -> None:
    """Both ends of a call by OpenAI's older fields."""
    call = {"name": "area", "arguments": '{"side": 3}'}
    old = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "area", "content": "9"},
    ]
    new = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "content": "9", "tool_call_id": "c"},
    ]
    text = template.render(chat(messages=old))
    assert text == template.render(chat(messages=new))
    assert '{"name": "area", "arguments": {"side": 3}}' in text
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}{% if m.role == 'tool' %}"
        + ("={{ m.tool_call_id }}:{{ m.name }}:{{ m.content }}{% endif %}{% endfor %}")
    )
    assert ChatTemplate(source, {}).render(chat(messages=old)) == "function0=function0:area:9"
    assert "<function>9" in ChatTemplate(ANY_ROLE, {}).render(chat(messages=old))
    with pytest.raises(InvalidRequest, match="does not render the role 'function'"):
        ChatTemplate(IF_TOOLS, {}).render(chat(messages=old))


def test_a_function_call_without_a_name_is_refused_by_name(template: ChatTemplate) -> None:
    with pytest.raises(InvalidRequest, match="function_call needs a name") as caught:
        template.render(chat(messages=[USER, {"role": "assistant", "function_call": {"arguments": "{}"}}]))
    assert caught.value.param == "messages[1].function_call"


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
OF_TOOLS = {"tools": TOOLS}
OF_DOCUMENTS = {"documents": [{"title": "t", "text": "x"}]}


@pytest.mark.parametrize(("source", "fields", "param"), [
    (PLAIN, OF_TOOLS, "tools"),
    (PLAIN, {**OF_TOOLS, "tool_choice": "required"}, "tools"),
    (PLAIN, OF_DOCUMENTS, "documents"),
    ("{{ tools }}" + PLAIN, {**OF_TOOLS, **OF_DOCUMENTS}, "documents"),
    ("{% if tools %}You have {{ tools | length }} tools.{% endif %}" + PLAIN, OF_TOOLS, "tools"),
    ("{% if shows is defined and shows %}{{ tools }}{% endif %}" + PLAIN, OF_TOOLS, "tools"),
])  # fmt: skip
@pytest.mark.parametrize("is_of_request", [False, True])
def test_tools_and_documents_that_would_vanish_are_refused(
    source: str, fields: dict[str, object], param: str, is_of_request: bool
) -> None:
    template = ChatTemplate(source, {}, is_of_request=is_of_request)
    for _ in range(2):
        with pytest.raises(
            InvalidRequest, match=f"{param}: this model's chat template does not render"
        ) as caught:
            template.render(chat(messages=[USER], **fields))
        assert caught.value.param == param
    assert template.render(chat(messages=[USER])).endswith("Hi")


@pytest.mark.parametrize(("source", "fields"), [
    (PLAIN, {**OF_TOOLS, "tool_choice": "none"}),
    ("{% for t in tools %}{{ t.function.description | upper }}{% endfor %}" + PLAIN, OF_TOOLS),
    ("{% if shows %}{{ tools }}{% endif %}" + PLAIN, {**OF_TOOLS, "chat_template_kwargs": {"shows": True}}),
    ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}" + PLAIN, OF_TOOLS),
    ("{% if messages[-1].content == 'Hi' %}{{ tools }}{% else %}{{ raise_exception('no') }}{% endif %}", OF_TOOLS),
])  # fmt: skip
def test_tools_that_a_template_may_render_pass(source: str, fields: dict[str, object]) -> None:
    """Also those of a template that fails on the probes."""
    ChatTemplate(source, {}).render(chat(messages=[USER], **fields))


def test_developer_stays_where_a_template_knows_it() -> None:
    rendered = ChatTemplate(ANY_ROLE, {}).render(chat(messages=[{"role": "developer", "content": "x"}, USER]))
    assert rendered == "<developer>x<user>Hi"


@pytest.mark.parametrize("role", ["wizard", "critic"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_role_that_would_vanish_is_refused(template: ChatTemplate, role: str, is_first: bool) -> None:
    message = {"role": role, "content": "x", "name": "f"}
    with pytest.raises(InvalidRequest, match=role) as caught:
        template.render(chat(messages=[message, USER] if is_first else [USER, message]))
    assert caught.value.param == f"messages[{0 if is_first else 1}].role"


def test_roles_that_a_template_renders_pass(template: ChatTemplate) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "one"},
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "two", "tool_call_id": "c"},
        {"role": "system", "content": "three"},
    ]
    text = template.render(chat(messages=messages))
    assert all(word in text for word in ("one", "two", "three"))
    assert (
        ChatTemplate(ANY_ROLE, {}).render(chat(messages=[{"role": "wizard", "content": "x"}])) == "<wizard>x"
    )


def test_a_template_that_refuses_a_role_says_why_itself() -> None:
    with pytest.raises(InvalidRequest, match="no system role"):
        ChatTemplate(NO_SYSTEM, {}).render(chat(messages=[{"role": "system", "content": "x"}, USER]))


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        (IF_TOOLS, {"tools": TOOLS}),
        (IF_DOCUMENTS, {"documents": [{"text": "x"}]}),
        (IF_ASKED, {"chat_template_kwargs": {"shows_results": True}}),
    ],
)
def test_what_becomes_of_a_role_may_depend_on_the_other_arguments(
    source: str, fields: dict[str, object]
) -> None:
    template = ChatTemplate(source, {})
    messages = [USER, TOOL_RESULT]
    for _ in range(2):
        assert "(42)" in template.render(chat(messages=messages, **fields))
        with pytest.raises(InvalidRequest, match="does not render the role 'tool'"):
            template.render(chat(messages=messages))


def test_a_role_that_needs_tools_is_refused_with_that_remedy() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        with pytest.raises(InvalidRequest, match="send the tools"):
            ChatTemplate(IF_TOOLS, {}).render(chat(messages=[USER, TOOL_RESULT], **fields))


@pytest.mark.parametrize(
    "changed",
    ["m.content|upper", "m.content|title", "m.content[:3]", "m.content[-2:]", "m.content.split('p')[0]"],
)
def test_a_template_may_change_what_it_renders(changed: str) -> None:
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {changed} }}}}{{% endfor %}}"
    told = {"role": "system", "content": "x"}
    assert "<system>" in ChatTemplate(source, {}).render(chat(messages=[told, USER, told]))


def test_the_number_of_roles_is_bounded() -> None:
    messages = [{"role": f"r{number}", "content": "x"} for number in range(17)]
    assert ChatTemplate(ANY_ROLE, {}).render(chat(messages=messages[:16])).endswith("<r15>x")
    with pytest.raises(InvalidRequest, match="17 roles; at most 16") as caught:
        ChatTemplate(ANY_ROLE, {}).render(chat(messages=messages))
    assert caught.value.param == "messages"
