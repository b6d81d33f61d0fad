"""StructuredOutputsParams: the `structured_outputs` object of a request. GrammarSpec: the grammar to compile.

This module bounds the size of such a request: a grammar that is too large for any legitimate use would occupy a
compiler until its deadline, so it is rejected before it gets there.
"""

from __future__ import annotations

import json as json_codec
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal

from msgspec import Struct

from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.grammar_checks import (
    check_grammar_size,
    check_notation,
    check_regex,
    grammar_size,
    least_json_size,
)
from argosy_engine.structured.json_schema import normalized_schema
from argosy_engine.structured.structural_tag import normalized_tag

MAX_TEXT_BYTES = 128 * 1024
"""Limit for a JSON schema, grammar or structural tag. The largest schemas of real tool catalogues are a third of it."""
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICES = 1024
_MAX_DIGITS = 309
"""Numbers with fewer are finite."""

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of which a request has one."""
_BACKENDS = (None, "auto", "xgrammar")


class GrammarSpec(Struct, frozen=True, array_like=True, weakref=True):
    """A grammar as text, checked and normalized. Equal specs compile to equal grammars, so it is the cache's key."""

    kind: Literal["json", "regex", "grammar", "structural_tag"]
    text: str
    """A JSON schema, regular expression, EBNF or structural tag."""
    any_whitespace: bool = True
    """Whether JSON may contain any white space between its tokens, instead of one canonical format."""


class StructuredOutputsParams(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=True
):
    """vLLM's `structured_outputs` object: exactly one kind is set."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    json_object: bool | None = None
    """True allows any JSON object."""
    regex: str | None = None
    """Regular expression that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """Texts of which the output is one."""
    grammar: str | None = None
    """EBNF in the GBNF dialect, with a rule named `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """XGrammar's description of free text with structured parts."""
    disable_any_whitespace: bool = False
    # vLLM's other fields, which its clients send with all the rest (`dataclasses.asdict`).
    disable_additional_properties: bool = False
    """No effect: objects that declare properties have no others anyway, unless the schema allows them."""
    disable_fallback: bool = False
    """No effect: there is one library of grammars."""
    whitespace_pattern: str | None = None
    """Refused unless null."""
    _backend: str | None = None
    """Refused if it names another library of grammars than ours."""
    _backend_was_auto: bool = False

    @classmethod
    def of_checked_tag(cls, tag: str, relaxed: Iterable[str] = ()) -> StructuredOutputsParams:
        """Return parameters with a structural tag that needs no check (`tool_call_tag`).

        Args:
            relaxed: keywords of the tools' schemas that the tag does not enforce.
        """
        params = cls(structural_tag=tag)
        params.__dict__["relaxed"] = tuple(sorted(relaxed))
        params.__dict__["_checked_spec"] = GrammarSpec("structural_tag", tag)
        return params

    @cached_property
    def relaxed(self) -> tuple[str, ...]:
        """Keywords of the tools' schemas that are not enforced, sorted. Not sent to the core."""
        return ()

    def spec(self) -> GrammarSpec:
        """Check the parameters and return the grammar to compile. The check is made once, for all prompts of a call.

        Raises:
            InvalidRequest: not exactly one kind is set, or it is out of bounds, malformed, or a JSON schema that cannot
                be enforced, or a field asks for what is not supported; `param` is the field of `structured_outputs`.
        """
        return self._checked_spec

    @cached_property
    def _checked_spec(self) -> GrammarSpec:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(
                f"structured_outputs needs exactly one of {', '.join(KINDS)}; there is {found}",
                "structured_outputs",
            )
        self._check_options()
        try:
            spec = self._spec(given[0])
            spec.text.encode()
        except InvalidRequest as error:
            raise InvalidRequest(f"{given[0]}: {error}", f"structured_outputs.{given[0]}") from None
        except UnicodeEncodeError:  # JSON text may hide them as escapes
            raise InvalidRequest(
                f"{given[0]}: contains lone surrogates, which are not text", f"structured_outputs.{given[0]}"
            ) from None
        return spec

    def _check_options(self) -> None:
        if self.whitespace_pattern is not None:
            raise InvalidRequest(
                "whitespace_pattern is not supported: JSON has any white space between its tokens, or one format with "
                "disable_any_whitespace",
                "structured_outputs.whitespace_pattern",
            )
        if self._backend not in _BACKENDS:
            raise InvalidRequest(
                f"_backend {self._backend[:64]!r} is not supported: this engine has xgrammar",
                "structured_outputs._backend",
            )

    def _spec(self, kind: str) -> GrammarSpec:
        any_whitespace = not self.disable_any_whitespace
        match kind:
            case "json":
                return GrammarSpec("json", normalized_schema(_parsed(self.json)), any_whitespace)
            case "json_object":
                return GrammarSpec("json", normalized_schema({"type": "object"}), any_whitespace)
            case "regex":
                regex = _bounded(self.regex or "", MAX_REGEX_BYTES)
                check_regex(regex)
                return GrammarSpec("regex", regex)
            case "choice":
                return GrammarSpec("grammar", _choice_grammar(self.choice or ()))
            case "grammar":
                grammar = _bounded(self.grammar or "", MAX_TEXT_BYTES)
                check_notation(grammar)
                check_grammar_size(grammar_size(grammar))
                return GrammarSpec("grammar", grammar)
            case _:
                return GrammarSpec("structural_tag", normalized_tag(_parsed(self.structural_tag)))


def _bounded(text: str, limit: int) -> str:
    """Return the text after checking its length.

    Raises:
        InvalidRequest: it is empty, longer than `limit` bytes, or contains lone surrogates.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("contains lone surrogates, which are not text") from None
    if not 0 < size <= limit:
        raise InvalidRequest(f"must have between 1 and {limit} bytes, has {size}")
    return text


def _parsed(value: str | dict[str, Any] | None) -> Any:
    """Parse a JSON value that is given as a value or as text, and check its size.

    A value is written and parsed as well: that copies it, and refuses what is not JSON.
    """
    if not isinstance(value, str) and least_json_size(value, MAX_TEXT_BYTES) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"must have between 1 and {MAX_TEXT_BYTES} bytes, has more")
    try:
        text = value if isinstance(value, str) else json_codec.dumps(value, ensure_ascii=False)
        text = _bounded(text, MAX_TEXT_BYTES)
        return json_codec.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_finite_whole
        )
    except InvalidRequest:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"is not valid JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise InvalidRequest("is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:32]} is too large")
    return value


def _finite_whole(text: str) -> int:
    """XGrammar refuses a number beyond floats without a reason."""
    if len(text) >= _MAX_DIGITS:
        _finite(text)
    return int(text)


def _choice_grammar(choices: tuple[str, ...]) -> str:
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"at most {MAX_CHOICES} choices, there are {len(choices)}")
    if not choices or not all(choices):
        raise InvalidRequest("needs at least one choice, none of them empty")
    _bounded("".join(choices), MAX_TEXT_BYTES)
    return _bounded("root ::= " + " | ".join(map(_literal, dict.fromkeys(choices))), 10 * MAX_TEXT_BYTES)


def _literal(text: str) -> str:
    """Quote a text as an EBNF string. All but ASCII letters, digits and spaces is escaped as code points."""
    return (
        '"'
        + "".join(c if c.isascii() and (c.isalnum() or c == " ") else f"\\U{ord(c):08X}" for c in text)
        + '"'
    )
