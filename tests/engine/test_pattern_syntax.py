"""Regular expressions that XGrammar accepts with a warning, but does not enforce, are refused."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest

from argosy_engine import StructuredOutputsParams
from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.grammar_checks import check_syntax
from argosy_engine.structured.xgrammar_backend import import_xgrammar

REFUSED = [
    ("^(?=.*[0-9])[a-z0-9]{3,6}$", "lookahead"),
    ("a(?!b)", "lookahead"),
    ("(?:(?=b)a)", "lookahead"),
    ("(?i)a", "flags"),
    ("(?i:a)", "flags"),
    ("a^b", r"\^ in the middle"),
    ("(a|b)^c", r"\^ in the middle"),
    ("a(^b|c)", r"\^ in the middle"),
    ("a$b", r"\$ in the middle"),
    ("$a", r"\$ in the middle"),
    ("(a$)b", r"\$ in the middle"),
    ("(a$|c)b", r"\$ in the middle"),
    ("(a|c$)b", r"\$ in the middle"),
    ("a$(b)", r"\$ in the middle"),
    (r"\Aa\Z", r"\\A"),
    (r"a\z", r"\\z"),
    (r"[a\Z]", r"\\Z"),
    (r"\\\h", r"\\h"),
]
ACCEPTED = [
    "", "^", "$", "^a$", "^a|b$", "^a$|^b$", "^(?:a|b)$", "(^a)", "(^|,)a", "((^a)|b)c", "a(b|c$)", "(a$|b$)", "^^a$$",
    "(?P<year>[0-9]{4})", "(?<year>[0-9]{4})", "[(?=]", r"\(?=", "[$^]", "[^]$^]a", r"\$a\^b", r"\\Z", r"[\\Z]",
    r"\d\w\s\D\W\S", r"\n\r\t\v\f\0\x41\u0041\cA[\b]", r"\-\/\.", "a{2}b{1,2}c{1,}", "a{b}c", "(", ")", "[", "\\",
]  # fmt: skip


def refusal(pattern: str) -> str | None:
    try:
        check_syntax(pattern)
    except InvalidRequest as error:
        return str(error)
    return None


def test_what_would_be_ignored_is_refused() -> None:
    told = [(pattern, message, refusal(pattern)) for pattern, message in REFUSED]
    assert [each for each in told if each[2] is None or not re.search(each[1], each[2])] == []


def test_what_is_enforced_or_malformed_passes() -> None:
    refused = {pattern: refusal(pattern) for pattern in ACCEPTED}
    assert {pattern: message for pattern, message in refused.items() if message is not None} == {}


def test_xgrammar_ignores_nothing_of_what_passes_but_anchors(capfd: pytest.CaptureFixture[str]) -> None:
    import_xgrammar()
    from xgrammar import Grammar

    ignored = {}
    for pattern in ACCEPTED:
        with contextlib.suppress(RuntimeError):  # malformed
            Grammar.from_regex(pattern)
        with contextlib.suppress(RuntimeError):
            Grammar.from_json_schema({"type": "string", "pattern": pattern})
        warnings = [line for line in capfd.readouterr().err.splitlines() if "Warning" in line]
        ignored[pattern] = [line for line in warnings if "'^'" not in line and "'$'" not in line]
    assert {pattern: warnings for pattern, warnings in ignored.items() if warnings} == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(?=b)a"},
        {"json": {"type": "string", "pattern": "(?=b)a"}},
        {"json": {"type": "object", "patternProperties": {"(?=b)a": {"type": "string"}}}},
        {"json": {"type": "object", "propertyNames": {"type": "string", "pattern": "(?=b)a"}}},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "(?=b)a"}}},
    ],
)
def test_every_field_with_a_pattern_is_checked(fields: dict[str, Any]) -> None:
    if "structural_tag" in fields:
        fields = {"structural_tag": json.dumps(fields["structural_tag"])}
    with pytest.raises(InvalidRequest, match="lookahead"):
        StructuredOutputsParams(**fields).spec()
