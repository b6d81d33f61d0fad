"""CEL rules of `spec.engine.args`: what an API server can tell of the engine's arguments.

Owns the type of an argument, the rules of the struct that has `args` and `type`, and their evaluation in Python. Must
not know numbers' bounds, which CEL cannot read out of a string: `engine_flags.argument_problems` judges these.
Invariant: a refused argument breaks one rule, because each rule is about a class of its own: no flag at all
(`ARGUMENT_RULES`), a flag of a field, of the operator, of a feature that there is not, an unknown one, and a value of
another type.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from argosy_resource.engine_flags import (
    FLAG_FIELDS,
    FLAGS,
    FORM,
    INTEGER,
    NUMBER,
    OPERATOR_FLAGS,
    SIZE,
    EngineFlag,
    field_problem,
    settable_flags,
)
from argosy_resource.foreign_engines import FOREIGN_ENGINES, OWN_KEY, EngineType
from argosy_resource.schema_types import Rule, rules_of

MAX_ARGUMENTS: Final = 32
MAX_ARGUMENT_LENGTH: Final = 1024
"""The API server multiplies the length of all arguments by that of the patterns below, and refuses what could take too
long."""


def _any_of(names: Iterable[str]) -> str:
    return f"({'|'.join(names)})"


def _names(names: Iterable[str]) -> str:
    """Pattern of the arguments with one of these flags, whatever the value."""
    return f"^--{_any_of(names)}(=|$)"


ARGUMENT_RULES: Final[dict[str, Any]] = rules_of(
    Rule(
        rule=f"self.matches(r'{FORM}')",
        message="must be one flag with two dashes, and its value behind '=': --flag=value, or --flag alone",
    )
)
Argument = Annotated[
    str, Meta(min_length=1, max_length=MAX_ARGUMENT_LENGTH, extra_json_schema=ARGUMENT_RULES)
]


class ArgumentRule(Struct, frozen=True, kw_only=True):
    """Which arguments of one engine are refused. From these parts come both the CEL and its evaluation in Python, for
    which an interpreter of CEL would take seconds."""

    engine: EngineType = "argosy"
    matching: tuple[str, ...]
    """Patterns of the arguments that are refused..."""
    allowed: str = ""
    """... unless they match this one."""
    value_may_follow: bool = False
    """... or are a flag whose value is perhaps an argument of its own, which `ARGUMENT_RULES` refuses with the remedy
    for both."""
    message: str
    named: str = ""
    """The message with the refused arguments in the place of its `%s`. The API server shows of the values of a list
    none."""

    @property
    def rule(self) -> Rule:
        """As a rule of the struct that has `args` and `type`."""
        parts = [f"!arg.matches(r'{pattern}')" for pattern in self.matching]
        parts += [f"arg.matches(r'{self.allowed}')"] if self.allowed else []
        parts += ["(!arg.contains('=') && self.args.exists(a, !a.startsWith('--')))"] * self.value_may_follow
        is_allowed = " || ".join(parts)
        is_other = (
            "(has(self.type) && self.type != 'argosy')"
            if self.engine == "argosy"
            else f"!has(self.type) || self.type != '{self.engine}'"
        )
        refused = f"self.args.filter(arg, !({is_allowed}))"
        return Rule(
            rule=f"!has(self.args) || {is_other} || self.args.all(arg, {is_allowed})",
            message=self.message,
            message_expression=f'"{self.named}".format([{refused}])' if self.named else "",
            field_path=".args",
        )

    def refused(self, args: Sequence[str], engine: str) -> list[str]:
        """The arguments that break the rule."""
        if engine != self.engine:
            return []
        value_follows = self.value_may_follow and not all(arg.startswith("--") for arg in args)
        return [
            arg
            for arg in args
            if all(_matches(pattern, arg) for pattern in self.matching)
            and not (self.allowed and _matches(self.allowed, arg))
            and not (value_follows and "=" not in arg)
        ]

    def told(self, refused: Sequence[str]) -> str:
        """The message about these arguments."""
        return self.named % json.dumps(refused, ensure_ascii=False) if self.named else self.message


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("$", r"\Z"))  # in CEL no line's end, but the string's


def _matches(pattern: str, argument: str) -> bool:
    return _compiled(pattern).search(argument) is not None


def _field_rules() -> Iterable[ArgumentRule]:
    """One for each field that sets flags."""
    flags: dict[str, list[str]] = {}
    for flag, field in FLAG_FIELDS.items():
        flags.setdefault(field, []).append(flag.removeprefix("--"))
    for names in flags.values():
        yield ArgumentRule(matching=(_names(names),), message=field_problem(names[0]))


def _operator_rules() -> Iterable[ArgumentRule]:
    """One for each reason why the operator keeps flags to itself."""
    flags: dict[str, list[str]] = {}
    for name, reason in OPERATOR_FLAGS.items():
        flags.setdefault(reason, []).append(name)
    for reason, names in flags.items():
        shown = ", ".join(f"--{name}" for name in names)
        pattern = _names([f"(no-)?{_any_of(names)}"])
        yield ArgumentRule(matching=(pattern,), message=f"{shown} cannot be set here: {reason}")


_VALUES: Final = {
    "integer": (INTEGER, "a whole number"),
    "size": (SIZE, "a whole number, perhaps followed by k, m, g, K, M or G"),
    "number": (NUMBER, "a number"),
    "json": ("[^a-zA-Z].*", "an object or a list of JSON"),
    "text": (".+", "a text"),
}
"""By kind of flag: the pattern of its values and what a value must be."""


def _value_rules() -> Iterable[ArgumentRule]:
    """One for each kind of values. Patterns of several flags' names and values together would cost too much."""
    kinds: dict[str, list[str]] = {}
    choices: dict[tuple[str, ...], list[str]] = {}
    asking: list[EngineFlag] = []
    for flag in settable_flags():
        if flag.choices:
            choices.setdefault(flag.choices, []).append(flag.name)
        elif flag.pattern:
            asking.append(flag)
        else:
            kinds.setdefault("size" if flag.is_size else flag.kind, []).append(flag.name)
    switches = kinds.pop("switch")
    yield ArgumentRule(
        matching=(FORM, f"^--(no-)?{_any_of(switches)}="),
        message="a switch takes no value; write --flag or --no-flag",
        named="a switch takes no value, as in %s; write --flag or --no-flag",
    )
    for kind, names in kinds.items():
        pattern, noun = _VALUES[kind]
        yield ArgumentRule(
            matching=(FORM, _names(names)),
            allowed=f"^[^=]*={pattern}$",
            value_may_follow=True,
            message=f"a flag must have {noun} behind '='",
            named=f"%s must have {noun} behind '='",
        )
    for values, names in choices.items():
        yield ArgumentRule(
            matching=(FORM, _names(names)),
            allowed=f"^[^=]*={_any_of(values)}$",
            value_may_follow=True,
            message=f"{', '.join(f'--{name}' for name in names)} must be one of {', '.join(values)}",
        )
    for flag in asking:
        yield ArgumentRule(
            matching=(FORM, _names([flag.name])),
            allowed=f"^[^=]*={flag.pattern}$",
            value_may_follow=True,
            message=f"--{flag.name} asks for what the engine does not do: {flag.asked}",
            named=f"%s is not supported: {flag.asked}",
        )


_REFUSED: Final = [
    flag.name
    for flag in FLAGS.values()
    if flag.refused and flag.name not in OPERATOR_FLAGS and f"--{flag.name}" not in FLAG_FIELDS
]
_KNOWN: Final = _names(
    [
        *(flag.removeprefix("--") for flag in FLAG_FIELDS),
        f"(no-)?{_any_of([*OPERATOR_FLAGS, *_REFUSED])}",
        f"(no-)?{_any_of(flag.name for flag in settable_flags() if flag.kind == 'switch')}",
        *(flag.name for flag in settable_flags() if flag.kind != "switch"),
    ]
)
_LIST: Final = "`argosy serve --help` and docs/reference/engine-flags.md list the flags"

_ARGS_RULES: Final = (
    *_field_rules(),
    *_operator_rules(),
    ArgumentRule(
        matching=(_names([f"(no-)?{_any_of(_REFUSED)}"]),),
        message="the engine does not support a flag; docs/reference/engine-flags.md says why",
        named="the engine does not support %s; docs/reference/engine-flags.md says why",
    ),
    ArgumentRule(
        matching=(FORM,),
        allowed=_KNOWN,
        message=f"the engine does not have a flag of this name; {_LIST}",
        named=f"the engine does not have the flag %s; {_LIST}",
    ),
    *_value_rules(),
    *(
        ArgumentRule(
            engine=kind,
            matching=(pattern,),
            message=(
                f"{', '.join(f'--{name}' for name in names)} of {kind} and short forms cannot be set here: {reason}"
            ),
            named="" if reason == OWN_KEY else f"%s cannot be set here: {reason}",  # a key is not repeated
        )
        for kind, engine in FOREIGN_ENGINES.items()
        for reason, (names, pattern) in engine.refusals.items()
    ),
)

RULE_OF_TEXT: Final = {each.rule.rule: each for each in _ARGS_RULES}
"""By the CEL of the rule."""
ARGS_RULES: Final = tuple(each.rule for each in _ARGS_RULES)
"""Rules of the struct that has `args` and `type`."""
