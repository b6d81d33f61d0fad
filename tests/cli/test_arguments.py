"""Flags between positional arguments, and `--`, behind which there are none."""

from __future__ import annotations

import pytest

from argosy.errors import UsageError
from argosy.terminal import Parser


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="argosy chat")
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--url", default="http://fleet")
    return parser


@pytest.mark.parametrize("prompt", ["hi", "--url=http://other", "--url", "-h", "-", ""])
@pytest.mark.parametrize(
    "before",
    [
        ["--", "tiny"],
        ["tiny", "--"],
        ["--url=http://fleet", "--", "tiny"],
        ["tiny", "--url=http://fleet", "--"],
    ],
)
def test_what_is_behind_two_dashes_is_no_flag(before: list[str], prompt: str, parser: Parser) -> None:
    options = parser.parse_args([*before, prompt])
    assert vars(options) == {"model": "tiny", "prompt": prompt, "url": "http://fleet"}


def test_only_the_first_two_dashes_are_a_mark(parser: Parser) -> None:
    assert parser.parse_args(["tiny", "--", "--"]).prompt == "--"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--url", "--", "tiny", "hi"], "argument --url: expected one argument;"),
        (["--", "tiny", "hi", "-h"], "unrecognized arguments: -h;"),
        (["--url=http://fleet", "--"], "the following arguments are required: model"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], error: str, parser: Parser) -> None:
    with pytest.raises(UsageError) as refusal:
        parser.parse_args(arguments)
    assert error in str(refusal.value)
