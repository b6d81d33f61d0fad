"""Limits of chat templates: time, length of what they make, and operations that make much of little."""

from __future__ import annotations

import time

import pytest

from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.template_sandbox import TemplateLimits
from chat_requests import chat

SHORT = TemplateLimits(cpu_s=0.2, chars=100_000)
LIMITS = SHORT._replace(cpu_s=10.0)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}x"
DOUBLING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}"
    "{{ ns.x | length }}"
)


def rendered(source: str, *, is_of_request: bool = True, limits: TemplateLimits = LIMITS) -> str:
    template = ChatTemplate(source, {}, is_of_request=is_of_request, limits=limits)
    return template.render(chat(messages=[{"role": "user", "content": "Hi"}]))


@pytest.mark.parametrize("is_of_request", [False, True])
@pytest.mark.parametrize(
    "source",
    [
        ENDLESS.replace("BODY", ""),
        ENDLESS.replace("BODY", "{% if j is odd %}{% continue %}{% endif %}"),
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro g() %}{% set a = caller() %}{% set b = caller() %}{% endmacro %}"
        + "{% call g() %}" * 15
        + "x"
        + "{% endcall %}" * 15,
    ],
)
def test_a_template_without_an_end_is_refused_at_its_deadline(source: str, is_of_request: bool) -> None:
    begun = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"the chat template takes more than 0\.2 seconds") as refused:
        rendered(source, is_of_request=is_of_request, limits=SHORT._replace(is_trusted=not is_of_request))
    assert refused.value.param == ("chat_template" if is_of_request else "messages")
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize("is_of_request", [False, True])
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{{ a }}{{ a }}{% else %}x{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% set x %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}{{ x | length }}",
    ],
)
def test_a_text_that_is_too_long_is_refused(source: str, is_of_request: bool) -> None:
    with pytest.raises(InvalidRequest, match="makes a text of more than 100000 characters"):
        rendered(source, is_of_request=is_of_request)


def doubling(start: str, expression: str) -> str:
    return DOUBLING.replace("START", start).replace("EXPRESSION", expression)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('x' * 10000000000) | length }}",
        "{{ (10000000000 * 'x') | length }}",
        "{{ ([0] * 10000000000) | length }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 2 ** 100000 }}",
        doubling("9", "ns.x * ns.x"),
        doubling("'x'", "ns.x + ns.x"),
        doubling("'x'", "ns.x ~ ns.x"),
        doubling("[1]", "ns.x + ns.x"),
        doubling("'x'", "'%s%s' % (ns.x, ns.x)"),
        doubling("'x'", "'{0}{0}'.format(ns.x)"),
        doubling("'x'", "'%s%s' | format(ns.x, ns.x)"),
        doubling("'x'", "ns.x | replace('x', 'xx')"),
        doubling("'x'", "ns.x.replace('x', 'xx')"),
        doubling("'x'", "[ns.x, ns.x] | join"),
        doubling("'x'", "''.join([ns.x, ns.x])"),
        doubling("'x'", "[ns.x] | map('replace', 'x', 'xx') | first"),
        doubling("'x'", "ns.x | attr('replace')('x', 'xx')"),
        doubling("[1]", "[ns.x, ns.x]").replace("ns.x | length", "ns.x"),
        doubling("[1]", "[ns.x, ns.x]").replace("ns.x | length", "ns.x | string"),
        doubling("[1]", "[ns.x, ns.x]").replace("ns.x | length", "ns.x | tojson"),
        doubling("[1]", "[ns.x, ns.x]").replace("ns.x | length", "'' ~ ns.x"),
        doubling("[1]", "[ns.x, ns.x]").replace("ns.x | length", "ns.x | join"),
        doubling("[1]", "[ns.x, ns.x]").replace("ns.x | length", "'%s' % ns.x"),
        doubling("[1]", "[ns.x, ns.x]").replace("ns.x | length", "'{}'.format(ns.x)"),
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, range(9999) | list] %}"
        "{% endfor %}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "{{ {'a': 1} | tojson(indent=1000000000) }}",
        "{{ range(9999) | list | tojson(separators=('x' * 9999, ':')) }}",
        "{{ range(9999) | list | tojson(False, none, ('x' * 9999, ':')) }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ [[1], [2]] | sum(start=[]) }}",
    ],
)
def test_an_operation_that_makes_much_of_little_is_refused(source: str) -> None:
    begun = time.thread_time()
    with pytest.raises(InvalidRequest) as refused:
        rendered(source)
    assert refused.value.param == "chat_template", refused.value
    assert time.thread_time() - begun < 2


SHARED = (
    "{% set ns = namespace(x=START, y=START) %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}"
    "{% set ns.y = OTHER %}{% endfor %}AFTER"
)


@pytest.mark.parametrize(
    "after",
    [
        *("{{ ns.x == ns.y }}", "{{ ns.x in [ns.y] }}", "{{ ns.x < ns.y }}", "{{ ns.x | unique | list }}"),
        *("{{ ns.x | replace('a', 'b') }}", "{{ [ns.x, ns.y] | sort | length }}", "{{ [ns.x, ns.y] | max }}"),
    ],
)
@pytest.mark.parametrize(
    "expression",
    [
        *("[ns.x, ns.x]", "(ns.x, ns.x)", "{'a': ns.x, 'b': ns.x}", "[[ns.x], [ns.x]]", "[ns.x] + [ns.x]"),
        *("cycler(ns.x, ns.x).items", "dict(a=ns.x, b=ns.x)", "[ns.x] * 2", "cycler(*[ns.x] * 2).items"),
    ],
)
def test_lists_that_share_their_entries_count_with_all_of_them(expression: str, after: str) -> None:
    source = SHARED.replace("AFTER", after).replace("OTHER", expression.replace("ns.x", "ns.y"))
    source = source.replace("EXPRESSION", expression)
    with pytest.raises(InvalidRequest, match="makes a text of more than 100000 characters"):
        rendered(source.replace("START", "[1]"))


def test_what_a_macro_is_called_with_counts_as_a_list() -> None:
    macro = "{% macro f(n) %}{{ varargs | length }}{% if n %}{{ f(n - 1, varargs, varargs) }}{% endif %}{% endmacro %}"
    with pytest.raises(InvalidRequest, match="makes a text of more than 100000 characters"):
        rendered(macro + "{{ f(60, [1]) }}")


@pytest.mark.parametrize("expression", ["[ns.x]", "(ns.x,)", "{'a': ns.x}", "cycler(ns.x).items"])
def test_lists_within_lists_have_a_depth(expression: str) -> None:
    with pytest.raises(InvalidRequest, match="lists within lists of more than 256 levels"):
        rendered(doubling("[1]", expression).replace("range(60)", "range(90000)"))


@pytest.mark.parametrize(
    "writing",
    ["{{ ns }}", "{{ ns ~ '' }}", "{{ ns | replace('a', 'b') }}", "{{ [[ns]] | string }}", "{{ '%s' % ns }}"],
)
def test_a_namespace_is_not_written(writing: str) -> None:
    with pytest.raises(InvalidRequest, match="writes a namespace"):
        rendered("{% set ns = namespace(x=1) %}" + writing)


def test_many_short_lists_and_calls_are_no_long_list() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for i in range(9000) %}{% set a, b = (i, [i, {'x': i}]) %}"
        "{% set ns.n = ns.n + 'x'.replace('x', 'yy').count('y') - 1 %}{% endfor %}{{ ns.n }}"
    )
    assert rendered(source) == "9000"


def test_what_templates_do_is_allowed() -> None:
    source = (
        "{% macro role(m) %}{{ '<' + m.role ~ '>' }}{% endmacro %}"
        "{% for m in messages %}{{ role(m) }}{{ m.content | trim | upper | replace('H', 'h') }}"
        "{% if loop.last %}.{% endif %}{{ '%s-%03d' % ('a', 7) }}{{ '-' * 3 }}{{ [1, 2] | join(',') }}{% endfor %}"
        "{{ tools | tojson(indent=2) if tools else {'a': [1]} | tojson }}{{ 'a b'.split(' ')[1] }}"
        "{{ '{} {}'.format('c', 5) }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ [3, 1] | sort | first }}{{ 'x' | center(3) }}{{ 'a\nb' | indent(2) }}{{ 2 ** 10 }}{{ [1, 2] | sum }}"
    )
    text = '<user>hI.a-007---1,2{"a": [1]}bc 511 x a\n  b10243'
    for is_of_request in (False, True):
        assert rendered(source, is_of_request=is_of_request) == text


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ 1" + " + 1" * 20000 + " }}"]
)
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate(source, {}, is_of_request=True)
