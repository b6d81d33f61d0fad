"""Flags of the engine in `spec.engine.args`: which ones a resource may give, and with which values.

Owns the flags and the check of such an argument, in words for people; `argument_rules` says in CEL what an API server
can tell. The flags, their types and bounds are the engine's own, written into `engine_flags.json` by `make generate`,
since nothing here may import the engine. Must not know the other fields. Invariants: a flag is set in one place only,
so one that a field or the operator sets is refused with that place; an argument that is accepted here is accepted by
the engine's parser, except that the content of JSON and the names of parsers and files are the engine's to judge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from argosy_protocol.program.flags import suggestion
from argosy_resource.foreign_engines import (
    FOREIGN_ENGINES,
    LISTENS,
    NAMES,
    OWN_KEY,
    EngineType,
    ForeignEngine,
)

FLAG_FIELDS: Final = {
    "--device": "engine.device",
    "--dtype": "engine.dtype",
    "--attention-backend": "engine.attentionBackend",
    "--max-model-len": "engine.maxModelLen",
    "--max-num-seqs": "engine.maxNumSeqs",
    "--max-num-batched-tokens": "engine.maxNumBatchedTokens",
    "--block-size": "engine.blockSize",
    "--kv-cache-memory-bytes": "engine.kvCacheMemory",
    "--gpu-memory-utilization": "engine.gpuMemoryUtilization",
    "--enable-prefix-caching": "engine.enablePrefixCaching",
    "--no-enable-prefix-caching": "engine.enablePrefixCaching",
    "--threads": "engine.threads",
    "--shutdown-timeout": "engine.shutdownTimeoutSeconds",
    "--tensor-parallel-size": "parallelism.tensor",
    "--pipeline-parallel-size": "parallelism.pipeline",
    "--data-parallel-size": "parallelism.data",
    "--enable-expert-parallel": "parallelism.expert",
    "--no-enable-expert-parallel": "parallelism.expert",
    "--nnodes": "parallelism.nodes",
}
"""Flags of the engine that fields of `spec` set, and by which its messages name these fields."""

_NODES: Final = "use spec.parallelism.nodes, from which it follows"
OPERATOR_FLAGS: Final[Mapping[str, str]] = {
    "host": LISTENS,
    "port": LISTENS,
    "uds": LISTENS,
    "root-path": LISTENS,
    "ssl-keyfile": LISTENS,
    "ssl-certfile": LISTENS,
    "ssl-ca-certs": LISTENS,
    "enable-ssl-refresh": LISTENS,
    "api-key": OWN_KEY,
    "api-keys-file": OWN_KEY,
    "admin-api-key": OWN_KEY,
    "node-rank": _NODES,
    "master-addr": _NODES,
    "master-port": _NODES,
    "node-key-file": _NODES,
    "headless": _NODES,
    "served-model-name": NAMES,
    "any-model-name": NAMES,
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
    pattern: str = ""
    """Of the values of a text that the engine takes; any other asks for what it does not do..."""
    asked: str = ""
    """... with this reason."""
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
        is_taken = not flag.pattern or re.fullmatch(flag.pattern, value) is not None
        return "" if is_taken else f"--{flag.name}={value[:64]} is not supported: {flag.asked}"
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
