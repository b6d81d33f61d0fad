"""Roles of messages that a chat template knows, and those that it would drop."""

from __future__ import annotations

import pytest

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.chat_template import ChatTemplate
from chat_requests import chat

USER = {"role": "user", "content": "Hi"}
ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}
{% elif m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"""


def test_developer_becomes_system_where_a_template_does_not_know_it(template: ChatTemplate) -> None:
    told = {"role": "developer", "content": "Answer in verse"}
    for messages in ([told, USER], [USER, told]):
        text = template.render(chat(messages=messages))
        assert "<|im_start|>system\nAnswer in verse<|im_end|>" in text


def test_developer_stays_where_a_template_knows_it() -> None:
    rendered = ChatTemplate(ANY_ROLE, {}).render(chat(messages=[{"role": "developer", "content": "x"}, USER]))
    assert rendered == "<developer>x<user>Hi"


@pytest.mark.parametrize("role", ["wizard", "function"])
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
