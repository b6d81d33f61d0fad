"""The engines that a service may run, and the arguments that `spec.engine.args` may give to each.

Owns what is known of stock vLLM and SGLang: program, the flags that fields of the resource become, and how each gets
its key. Owns the check of an argument, in words for people (`argument_problems`) and, as far as an API server can tell,
in CEL (`ARGUMENT_RULES` and the rules of `type`), with an evaluation in Python. Our engine's flags, their types and
bounds are written into `engine_flags.json` by `make generate`, since nothing here may import the engine. Must not know
the other fields, or pods. Invariants: a field that an engine cannot honour is refused by a rule, never ignored; a flag
is set in one place only, so one that a field or the operator sets is refused with that place; an argument that is
accepted is accepted by the engine's parser, except that the content of JSON and the names of parsers and files are the
engine's to judge; a refused argument breaks one rule, because each is about a class of its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.program.flags import suggestion
from argosy_resource.schema_types import Rule, rules_of

EngineType = Literal["argosy", "vllm", "sglang"]


def default_image_value(engine_type: str) -> str:
    """The value of the Helm chart that names the image of engines for which a manifest names none."""
    return "engine.image" if engine_type == "argosy" else f"engine.{engine_type}Image"


class ForeignEngine(Struct, frozen=True, kw_only=True):
    """How one of them is started and reached."""

    command: tuple[str, ...]
    """The program, whatever the image's entry point is."""
    model_flag: str = ""
    """Flag before the model's directory; empty if it is the first argument."""
    switches: tuple[str, ...] = ()
    """Flags that it always gets."""
    fields: Mapping[str, str]
    """Field of `spec.engine` or `spec.parallelism` (as in Python) -> the flag that has its value."""
    no_prefix_caching: str
    expert: str = ""
    """Flag of `parallelism.expert`; empty if there is none."""
    takes_aliases: bool
    """Whether it answers to several names."""
    key_variable: str = ""
    """Environment variable from which it reads its key; empty if it only has a flag for it."""
    reserved: Mapping[str, str]
    """Further flags that the operator sets, or that would keep routers from reaching it, without dashes, each with the
    remedy or the reason."""

    @property
    def own_flags(self) -> dict[str, str]:
        """All flags that `spec.engine.args` may not give, without dashes, each with the remedy or the reason."""
        flags = {flag: f"use spec.{_path(field)}" for field, flag in self.fields.items()}
        flags |= {self.no_prefix_caching: _PREFIX_CACHING, self.expert: "use spec.parallelism.expert"}
        flags |= {
            self.model_flag: _MODEL,
            **dict.fromkeys(self.switches, "routers need it, so it is always set"),
        }
        named = {flag.removeprefix("--"): reason for flag, reason in flags.items() if flag}
        return named | {name: reason for name, reason in self.reserved.items() if name not in named}

    @property
    def refusals(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """Reason -> the flags that are refused for it, and the pattern of their arguments. Together the patterns match
        what `own_pattern` does, and each argument matches one of them: the beginning of several flags is that of the
        first."""
        flags: dict[str, list[str]] = {}
        patterns: dict[str, list[str]] = {}
        earlier: list[str] = []
        for name, reason in self.own_flags.items():
            flags.setdefault(reason, []).append(name)
            beginnings = [name[:length] for length in range(1, len(name) + 1)]
            taken = sum(any(other.startswith(each) for other in earlier) for each in beginnings)
            if taken < len(name):
                patterns.setdefault(reason, []).append(_shortened(name, taken + 1))
            earlier.append(name)
        return {reason: (tuple(flags[reason]), _arguments(each)) for reason, each in patterns.items()}

    @property
    def own_pattern(self) -> str:
        """Matches an argument whose flag is one of `own_flags`, as the engine's parser (argparse) reads it: shortened,
        and in vLLM with underscores or with a key of JSON behind a dot. No other flag is a short form of these."""
        return _arguments(map(_shortened, self.own_flags))


def _arguments(names: Iterable[str]) -> str:
    """Pattern of the arguments with flags of these patterns."""
    return f"^--({'|'.join(names)})([=.]|$)"


def _shortened(name: str, least: int = 1) -> str:
    """Pattern of the name and of its beginnings of at least so many characters."""
    chars = ["[_-]" if each == "-" else each for each in name]
    return "".join(chars[:least]) + "".join(f"({each}" for each in chars[least:]) + ")?" * len(chars[least:])


def _path(field: str) -> str:
    """Path below `spec` of a key of `ForeignEngine.fields`."""
    if field in ("tensor", "pipeline", "data", "nodes"):
        return f"parallelism.{field}"
    first, *others = field.removesuffix("_bytes").split("_")
    return "engine." + first + "".join(each.capitalize() for each in others)


READY_PATH: Final = "/health"
"""Both answer it once the model is loaded."""

_MODEL: Final = "use spec.model.source"
_PREFIX_CACHING: Final = "use spec.engine.enablePrefixCaching"
LISTENS: Final = "engines listen where routers and probes call them, by plain HTTP"
NAMES: Final = "use spec.model.servedName and aliases"
OWN_KEY: Final = "an engine has the key of its service's Secret"
_ONE_NODE: Final = "the operator starts one node of such an engine, which would wait for others for ever"
_RESERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("host", "port", "root-path", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"), LISTENS),
    "api-key": OWN_KEY,
    "config": "list the flags of the file here",
    "model": _MODEL,
    "served-model-name": NAMES,
    **dict.fromkeys(("nnodes", "node-rank"), _ONE_NODE),
}

FIELD_FLAGS: Final[Mapping[str, str]] = {
    "device": "--device",
    "dtype": "--dtype",
    "attention_backend": "--attention-backend",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "threads": "--threads",
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
    "nodes": "--nnodes",
    "shutdown_timeout_seconds": "--shutdown-timeout",
}
"""Field of `spec.engine` or `spec.parallelism` (as in Python) -> the flag of our engine that has its value."""
_OF_VLLM: Final = (
    *(
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "kv_cache_memory_bytes",
    ),
    *("gpu_memory_utilization", "shutdown_timeout_seconds", "tensor", "pipeline", "data"),
)
"""Fields whose flags vLLM has too."""

FOREIGN_ENGINES: Final[Mapping[EngineType, ForeignEngine]] = {
    "vllm": ForeignEngine(
        command=("vllm", "serve"),
        fields={name: FIELD_FLAGS[name] for name in _OF_VLLM},
        no_prefix_caching="--no-enable-prefix-caching",
        expert="--enable-expert-parallel",
        takes_aliases=True,
        key_variable="VLLM_API_KEY",
        reserved={
            **_RESERVED,
            "uds": LISTENS,
            "enable-prefix-caching": _PREFIX_CACHING,
            **dict.fromkeys(("headless", "master-addr", "master-port"), _ONE_NODE),
        },
    ),
    "sglang": ForeignEngine(
        command=("python3", "-m", "sglang.launch_server"),
        model_flag="--model-path",
        switches=("--enable-metrics",),
        fields={
            "device": "--device",
            "dtype": "--dtype",
            "max_model_len": "--context-length",
            "max_num_seqs": "--max-running-requests",
            "max_num_batched_tokens": "--chunked-prefill-size",
            "block_size": "--page-size",
            "gpu_memory_utilization": "--mem-fraction-static",
            "tensor": "--tensor-parallel-size",
            "pipeline": "--pipeline-parallel-size",
            "data": "--data-parallel-size",
        },
        no_prefix_caching="--disable-radix-cache",
        takes_aliases=False,
        reserved={
            **_RESERVED,
            "tp-size": "use spec.parallelism.tensor",
            "pp-size": "use spec.parallelism.pipeline",
            "dp-size": "use spec.parallelism.data",
            "admin-api-key": OWN_KEY,
            "dist-init-addr": _ONE_NODE,
        },
    ),
}
"""By `spec.engine.type`."""


FLAG_FIELDS: Final = {
    **{flag: _path(field) for field, flag in FIELD_FLAGS.items()},
    **dict.fromkeys(("--enable-prefix-caching", "--no-enable-prefix-caching"), "engine.enablePrefixCaching"),
    **dict.fromkeys(("--enable-expert-parallel", "--no-enable-expert-parallel"), "parallelism.expert"),
}
"""Flags of the engine that fields of `spec` set, and by which its messages name these fields."""

_NODES: Final = "use spec.parallelism.nodes, from which it follows"
OPERATOR_FLAGS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("host", "port", "uds", "root-path", "ssl-keyfile", "ssl-certfile"), LISTENS),
    **dict.fromkeys(("ssl-ca-certs", "enable-ssl-refresh"), LISTENS),
    **dict.fromkeys(("api-key", "api-keys-file", "admin-api-key"), OWN_KEY),
    **dict.fromkeys(("node-rank", "master-addr", "master-port", "node-key-file", "headless"), _NODES),
    **dict.fromkeys(("served-model-name", "any-model-name"), NAMES),
    "download-dir": "use spec.model.cache",
    "revision": "name the revision in spec.model.source, such as hf://ORG/NAME@REVISION",
    "config": "list the flags of the file here",
}
"""Flags that the operator sets, or has no use for, by name, each with the reason or the remedy."""


class EngineFlag(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One flag of the engine."""

    name: str
    """Without leading dashes."""
    kind: Literal["switch", "integer", "number", "text", "json"]
    choices: tuple[str, ...] = ()
    """The values that it takes; empty for any."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    is_size: bool = False
    """Whether a whole number may have one of the suffixes k, m, g, K, M, G."""
    is_repeatable: bool = False
    refused: str = ""
    """Why the engine refuses it, if it does."""
    neutral: tuple[str, ...] = ()
    """Values of a refused flag that ask for nothing."""


FLAGS: Final[Mapping[str, EngineFlag]] = {
    flag.name: flag
    for flag in msgspec.json.decode(
        Path(__file__).with_name("engine_flags.json").read_bytes(), type=tuple[EngineFlag, ...]
    )
}
"""Every flag of the engine, by its name without dashes."""

FORM: Final = r"^--[A-Za-z0-9][A-Za-z0-9._-]{0,127}(=[^\x00-\x1f\x7f]*)?$"
INTEGER: Final = "[-+]?[0-9]+"
SIZE: Final = "[0-9]+([.][0-9]+)?[kmgKMG]?"
NUMBER: Final = "[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?"
_SIZES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def settable_flags() -> list[EngineFlag]:
    """The flags that `spec.engine.args` may give."""
    return [
        flag
        for flag in FLAGS.values()
        if not flag.refused and flag.name not in OPERATOR_FLAGS and f"--{flag.name}" not in FLAG_FIELDS
    ]


def field_problem(name: str) -> str:
    """Why a flag that a field sets is refused, by the flag's name without dashes; empty if no field sets it."""
    field = FLAG_FIELDS.get(f"--{name}", "")
    return f"--{name} is set by spec.{field}" if field else ""


def argument_problems(args: Sequence[str], engine_type: EngineType = "argosy") -> list[str]:
    """What is wrong with the arguments of `spec.engine.args`, each with its remedy; empty if nothing is. Of another
    engine only those flags are known that are not the user's."""
    foreign = FOREIGN_ENGINES.get(engine_type)
    if foreign is not None:
        return [
            _foreign_problem(foreign, argument)
            for argument in args
            if re.search(foreign.own_pattern, argument)
        ]
    problems = [found for argument in args if (found := _problem(argument))]
    names = [_split(argument)[0] for argument in args]
    for name in dict.fromkeys(names):
        flag = FLAGS.get(name)
        if flag is not None and names.count(name) > 1 and not flag.is_repeatable:
            problems.append(f"--{name} is given {names.count(name)} times; give it once")
    return problems


def _foreign_problem(engine: ForeignEngine, argument: str) -> str:
    """Why an argument that matches the engine's own flags is refused."""
    given = re.split("[=.]", argument.removeprefix("--"), maxsplit=1)[0]
    name = given.replace("_", "-")
    meant = next(
        flag for flag in (name, *engine.own_flags) if flag in engine.own_flags and flag.startswith(name)
    )
    short = "" if meant == given else f" stands for --{meant}, which"
    return f"--{given}{short} cannot be set here: {engine.own_flags[meant]}"


def _split(argument: str) -> tuple[str, str | None]:
    """The flag's name without dashes (of a switch without `no-`) and its value, None without one."""
    name, equals, value = argument.removeprefix("--").partition("=")
    positive = name.removeprefix("no-")
    if name not in FLAGS and positive in FLAGS and FLAGS[positive].kind == "switch":
        name = positive
    return name, value if equals else None


def _problem(argument: str) -> str:
    name, value = _split(argument)
    if re.search(FORM, argument) is None:
        return f"{argument[:64]!r} is not --flag=value or --flag"
    if problem := field_problem(name):
        return problem
    if name in OPERATOR_FLAGS:
        return f"--{name} cannot be set here: {OPERATOR_FLAGS[name]}"
    flag = FLAGS.get(name)
    if flag is None:
        known = [f"--{each.name}" for each in settable_flags()]
        return f"unknown flag --{name}{suggestion(f'--{name}', known)}"
    if flag.refused and not (value is not None and value in flag.neutral):
        return f"--{name} is not supported: {flag.refused}"
    if flag.kind == "switch":
        return "" if value is None else f"--{name} takes no value; write --{name} or --no-{name}"
    if not value:
        return f"--{name} needs a value: --{name}=VALUE"
    return _value_problem(flag, value)


def _value_problem(flag: EngineFlag, value: str) -> str:
    if flag.choices:
        return "" if value in flag.choices else f"--{flag.name} must be one of {', '.join(flag.choices)}"
    if flag.kind == "json":
        return "" if _is_json(value) else f"--{flag.name} is not JSON: {value[:64]!r}"
    if flag.kind == "text":
        return ""
    number = _number(flag, value)
    low, above, high, below = flag.ge, flag.gt, flag.le, flag.lt
    if (
        number is None
        or (low is not None and number < low)
        or (above is not None and number <= above)
        or (high is not None and number > high)
        or (below is not None and number >= below)
    ):
        return f"--{flag.name} must be {_requirement(flag)}, not {value[:64]}"
    return ""


def _is_json(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict | list)
    except (ValueError, RecursionError):
        return False


def _number(flag: EngineFlag, value: str) -> float | int | None:
    """The value as a number; None if it is none of the flag's kind."""
    if flag.kind == "number":
        return float(value) if re.fullmatch(NUMBER, value) else None
    if flag.is_size and value[-1] in _SIZES and re.fullmatch(SIZE, value):
        size = float(value[:-1]) * _SIZES[value[-1]]
        return int(size) if size.is_integer() else None
    whole = "-?[0-9]+" if flag.is_size else INTEGER
    return int(value) if re.fullmatch(whole, value) and len(value.lstrip("+-")) < 20 else None


def _requirement(flag: EngineFlag) -> str:
    noun = "a number" if flag.kind == "number" else "a whole number"
    limits = (("at least", flag.ge), ("above", flag.gt), ("at most", flag.le), ("below", flag.lt))
    words = [
        f"{word} {bound:g}" if bound < 10**6 else f"{word} {bound:.0f}"
        for word, bound in limits
        if bound is not None
    ]
    return " ".join([noun, " and ".join(words)]).strip()


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
    for flag in settable_flags():
        if flag.choices:
            choices.setdefault(flag.choices, []).append(flag.name)
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
